//! A path in a stored position.
//!
//! A file name on Linux is bytes, and JSON holds only text. A path that is text is stored as it is,
//! which is also the form of earlier versions. Any other path is stored as a NUL character, which no
//! path contains, followed by one character (U+0000 to U+00FF) for each byte.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// A path that survives JSON, whatever its bytes are.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StoredPath(pub(crate) PathBuf);

impl Serialize for StoredPath {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.0.to_str() {
            Some(text) => s.serialize_str(text),
            None => {
                let bytes = self.0.as_os_str().as_bytes().iter().map(|&b| char::from(b));
                s.serialize_str(&['\0'].into_iter().chain(bytes).collect::<String>())
            }
        }
    }
}

impl<'de> Deserialize<'de> for StoredPath {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<StoredPath, D::Error> {
        let text = String::deserialize(d)?;
        let Some(bytes) = text.strip_prefix('\0') else { return Ok(StoredPath(text.into())) };
        let bytes: Result<Vec<u8>, _> = bytes.chars().map(|c| u8::try_from(u32::from(c))).collect();
        let bytes = bytes.map_err(|_| D::Error::custom("a stored path has a character that is no byte"))?;
        Ok(StoredPath(OsString::from_vec(bytes).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_survive(bytes in proptest::collection::vec(1u8.., 0..40)) {
            let path = StoredPath(OsString::from_vec(bytes).into());
            let text = serde_json::to_string(&path).unwrap();
            prop_assert_eq!(serde_json::from_str::<StoredPath>(&text).unwrap(), path);
        }
    }

    #[test]
    fn text_is_stored_as_it_is() {
        let path = StoredPath("runs/ä/events.out.tfevents.1".into());
        assert_eq!(serde_json::to_string(&path).unwrap(), "\"runs/ä/events.out.tfevents.1\"");
        let odd = serde_json::to_string(&StoredPath(OsString::from_vec(b"x\xff".to_vec()).into())).unwrap();
        assert_eq!(odd, "\"\\u0000xÿ\"");
        assert!(serde_json::from_str::<StoredPath>("\"\\u0000\u{100}\"").is_err());
    }
}
