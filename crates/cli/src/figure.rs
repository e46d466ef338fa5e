//! Figures as files: SVG as it is, PNG for where SVG is not shown, a whole page as HTML; the file's ending says which.

use anyhow::{Context, Result, bail};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::fontdb::Database;
use resvg::usvg::{Options, Tree};
use std::path::Path;

/// What can be written where.
pub struct Drawing<'a> {
    /// The one that stands for all, if there is anything to draw.
    pub svg: Option<&'a str>,
    /// Everything on one page, where there is such a page.
    pub page: Option<&'a dyn Fn() -> Result<String>>,
}

/// Refuses an ending nothing can be written for: before the work is done, not after.
pub fn check(path: Option<&Path>, with_page: bool) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    match path.extension().and_then(|e| e.to_str()) {
        Some("svg" | "png") => Ok(()),
        Some("html") if with_page => Ok(()),
        _ => {
            let page = if with_page { ", whole pages as .html" } else { "" };
            bail!("{}: figures are written as .svg or .png{page}; choose one of these endings", path.display())
        }
    }
}

/// Writes the figure, or the page, by the file's ending.
pub fn write(path: &Path, drawing: &Drawing) -> Result<()> {
    check(Some(path), drawing.page.is_some())?;
    let svg = || drawing.svg.context("there is nothing to draw");
    let bytes = match (path.extension().and_then(|e| e.to_str()), drawing.page) {
        (Some("html"), Some(page)) => page()?.into_bytes(),
        (Some("png"), _) => png(svg()?)?,
        _ => svg()?.as_bytes().to_vec(),
    };
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Pixels for each unit of the figure: sharp on today's screens and in print.
const SCALE: f32 = 2.0;

fn png(svg: &str) -> Result<Vec<u8>> {
    let mut options = Options::default();
    let fonts = options.fontdb_mut();
    fonts.load_system_fonts();
    let family = sans_serif(fonts).context(
        "no font is installed, and a picture without its labels says nothing; install one (Debian: fonts-dejavu-core) or write .svg",
    )?;
    fonts.set_sans_serif_family(family);
    let tree = Tree::from_str(svg, &options).context("the figure cannot be drawn; write .svg instead")?;
    let size = tree.size().to_int_size().scale_by(SCALE).context("the figure has no size")?;
    let mut pixels = Pixmap::new(size.width(), size.height()).context("the figure has no size")?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    pixels.encode_png().context("the figure cannot be written as .png; write .svg instead")
}

/// A font that is there and readable: one of the usual ones, else any.
fn sans_serif(fonts: &Database) -> Option<String> {
    let families = || fonts.faces().flat_map(|f| f.families.iter().map(|(name, _)| name.as_str()));
    let usual = ["DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica"];
    let found = usual.into_iter().find(|u| families().any(|f| f == *u));
    found.or_else(|| families().next()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ending_decides_and_an_unknown_one_is_refused_at_once() {
        for (name, page, sound) in [
            ("a.svg", false, true),
            ("a.png", false, true),
            ("a.html", true, true),
            ("a.html", false, false),
            ("a", true, false),
        ] {
            assert_eq!(check(Some(Path::new(name)), page).is_ok(), sound, "{name}");
        }
    }

    #[test]
    fn a_picture_has_the_pixels_of_its_figure() {
        let svg = r##"<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><rect width="40" height="20" fill="#ff0000"/></svg>"##;
        let bytes = png(svg).expect("a font is installed where tests run");
        let pixels = Pixmap::decode_png(&bytes).expect("a picture");
        assert_eq!((pixels.width(), pixels.height()), (80, 40));
        assert!(pixels.pixels().iter().all(|p| (p.red(), p.green(), p.blue()) == (255, 0, 0)));
    }
}
