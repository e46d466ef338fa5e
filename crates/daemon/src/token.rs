//! The secret of the TCP listener, and the secrets of single jobs that are derived from it.
//!
//! The token is in a file that only the daemon's user can read. A job gets a token of its own for the route
//! to which it pushes its progress; that token opens nothing else.

use sha2::{Digest, Sha256};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use subtle::ConstantTimeEq;

/// The secret that opens the TCP listener: 32 random bytes as hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// Reads the token, or makes a new one if the file has no whole one.
    pub(crate) fn load_or_make(path: &Path) -> std::io::Result<Token> {
        if let Ok(text) = std::fs::read_to_string(path) {
            let text = text.trim();
            if text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Ok(Token(text.to_owned()));
            }
        }
        let mut bytes = [0u8; 32];
        getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
        let token = hex::encode(bytes);
        let aside = path.with_extension("new");
        let _ = std::fs::remove_file(&aside);
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        writeln!(file, "{token}")?;
        file.sync_all()?;
        std::fs::rename(&aside, path)?;
        Ok(Token(token))
    }

    #[cfg(test)]
    pub(crate) fn of_text(text: String) -> Token {
        Token(text)
    }

    /// Opens nothing but one job's push route. The same for as long as the token is the same, so
    /// that a job's environment stays true when the daemon restarts.
    pub(crate) fn for_push(&self, job: u64) -> Token {
        let mut hash = Sha256::new();
        hash.update(b"push\0");
        hash.update(self.0.as_bytes());
        hash.update(job.to_le_bytes());
        Token(hex::encode(hash.finalize()))
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    /// Takes as long for a near miss as for a wrong guess.
    pub(crate) fn matches(&self, given: &str) -> bool {
        self.0.as_bytes().ct_eq(given.as_bytes()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_kept_private_and_made_again_when_torn() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let first = Token::load_or_make(&path).unwrap();
        assert_eq!(Token::load_or_make(&path).unwrap(), first);
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        std::fs::write(&path, "short").unwrap();
        assert_ne!(Token::load_or_make(&path).unwrap(), first);
        assert_eq!(format!("{first:?}"), "Token(…)");
    }
}
