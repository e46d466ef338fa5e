//! Events on objects: what people read with `kubectl describe`. A lost event is harmless.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder};

/// In bytes; the API server accepts 1024.
const LONGEST_NOTE: usize = 1000;

/// One object of a kind.
pub(crate) struct Subject<'a> {
    pub(crate) api_version: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) uid: Option<&'a str>,
}

/// An event before it is published.
pub(crate) struct Text<'a> {
    pub(crate) warns: bool,
    /// A word for programs, such as `Stopping`.
    pub(crate) reason: &'a str,
    /// A sentence for people.
    pub(crate) note: &'a str,
    /// What the operator was doing, such as `Share`.
    pub(crate) action: &'static str,
}

pub(crate) async fn publish(recorder: &Recorder, subject: Subject<'_>, text: Text<'_>) {
    let event = Event {
        type_: if text.warns { EventType::Warning } else { EventType::Normal },
        reason: text.reason.to_owned(),
        note: Some(shorten(text.note)),
        action: text.action.to_owned(),
        secondary: None,
    };
    let reference = ObjectReference {
        api_version: Some(subject.api_version.to_owned()),
        kind: Some(subject.kind.to_owned()),
        namespace: Some(subject.namespace.to_owned()),
        name: Some(subject.name.to_owned()),
        uid: subject.uid.map(str::to_owned),
        ..ObjectReference::default()
    };
    if let Err(error) = recorder.publish(&event, &reference).await {
        tracing::debug!(%error, "event not published");
    }
}

/// The note, cut after the last letter that fits.
fn shorten(note: &str) -> String {
    let end = note.char_indices().map(|(at, letter)| at + letter.len_utf8()).take_while(|end| *end <= LONGEST_NOTE);
    note[..end.last().unwrap_or(0)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_fit_and_end_at_a_letter() {
        assert_eq!(shorten("short"), "short");
        assert_eq!(shorten(""), "");
        let long = "ä".repeat(2000);
        assert_eq!(shorten(&long).len(), LONGEST_NOTE);
        assert!(long.starts_with(&shorten(&long)));
    }
}
