//! Figures as files: a picture as `.svg`, a whole page as `.html`. The file's ending says which.

use std::path::{Path, PathBuf};

/// Why a figure could not be written.
#[derive(Debug, thiserror::Error)]
pub enum FigureError {
    #[error("{}: figures are written as {endings}; choose one of these endings", path.display())]
    UnknownEnding { path: PathBuf, endings: &'static str },
    #[error("{}: there is nothing to draw", path.display())]
    Empty { path: PathBuf },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

/// What can be written where.
pub struct Drawing<'a> {
    /// The picture that stands for all, if there is anything to draw.
    pub svg: Option<&'a str>,
    /// Makes one page with everything, where there is such a page.
    pub page: Option<&'a dyn Fn() -> String>,
}

/// Refuses an ending for which nothing can be written. Commands call it before the work is done.
pub fn check(path: Option<&Path>, with_page: bool) -> Result<(), FigureError> {
    let Some(path) = path else { return Ok(()) };
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("svg") => Ok(()),
        Some("html") if with_page => Ok(()),
        _ => {
            let endings = if with_page { ".svg or .html" } else { ".svg" };
            Err(FigureError::UnknownEnding { path: path.to_owned(), endings })
        }
    }
}

/// Writes the figure, or the page, by the file's ending.
pub fn write(path: &Path, drawing: &Drawing) -> Result<(), FigureError> {
    check(Some(path), drawing.page.is_some())?;
    let text = match (path.extension().and_then(|ending| ending.to_str()), drawing.page) {
        (Some("html"), Some(page)) => page(),
        _ => drawing.svg.ok_or_else(|| FigureError::Empty { path: path.to_owned() })?.to_owned(),
    };
    std::fs::write(path, text).map_err(|source| FigureError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ending_decides_and_an_unknown_one_is_refused_at_once() {
        for (name, with_page, is_sound) in [
            ("a.svg", false, true),
            ("a.png", true, false),
            ("a.html", true, true),
            ("a.html", false, false),
            ("a", true, false),
        ] {
            assert_eq!(check(Some(Path::new(name)), with_page).is_ok(), is_sound, "{name}");
        }
    }

    #[test]
    fn a_page_is_made_only_for_html() {
        let folder = std::env::temp_dir().join(format!("gainshare-figures-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        let page = || "<html/>".to_owned();
        let drawing = Drawing { svg: Some("<svg/>"), page: Some(&page) };
        for (name, expected) in [("a.svg", "<svg/>"), ("a.html", "<html/>")] {
            write(&folder.join(name), &drawing).expect("both endings can be written");
            assert_eq!(std::fs::read_to_string(folder.join(name)).expect("the file"), expected);
        }
        let empty = Drawing { svg: None, page: None };
        assert!(matches!(write(&folder.join("b.svg"), &empty), Err(FigureError::Empty { .. })));
        std::fs::remove_dir_all(&folder).expect("our own folder");
    }
}
