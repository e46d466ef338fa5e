//! Stories about a job in which an operator dies at most once, before or after one of its writes.
//!
//! A story is played once without a death. [`die_around_each_write`] plays it again for every write and for both sides
//! of the write: the operator dies there, and the next one has only what the API server has. At the end everything is
//! as without the death.

use serde_json::Value;

/// Where an operator dies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Death {
    /// The number of the write, from 0.
    write: usize,
    /// Before the write takes effect, or after it.
    before: bool,
}

/// The writes of a story, one after the other. One of them is deadly.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    death: Option<Death>,
    /// The name of each write.
    pub(crate) names: Vec<&'static str>,
    pub(crate) has_died: bool,
}

impl Writes {
    pub(crate) fn with(death: Option<Death>) -> Writes {
        Writes { death, ..Writes::default() }
    }

    /// One request. Answers whether the operator lives on.
    pub(crate) fn request(&mut self, name: &'static str, take_effect: impl FnOnce()) -> bool {
        let number = self.names.len();
        let dies = |before: bool| self.death == Some(Death { write: number, before }) && !self.has_died;
        if dies(true) {
            self.has_died = true;
            return false;
        }
        let dies_after = dies(false);
        self.names.push(name);
        take_effect();
        self.has_died |= dies_after;
        !dies_after
    }
}

/// What a story leaves behind.
pub(crate) trait Scene {
    fn writes(&self) -> &Writes;

    /// What must be the same with and without a death.
    fn state(&self) -> Value;
}

/// Plays a story with a death around each of its writes. Answers the names of the writes, and how many operators died.
pub(crate) fn die_around_each_write<S: Scene>(
    title: &str,
    play: impl Fn(Option<Death>) -> S,
) -> (Vec<&'static str>, usize) {
    let undisturbed = play(None);
    let names = undisturbed.writes().names.clone();
    for (write, name) in names.iter().enumerate() {
        for before in [true, false] {
            let scene = play(Some(Death { write, before }));
            let side = if before { "before" } else { "after" };
            let place = format!("{title}, {side} write {write} ({name})");
            assert!(scene.writes().has_died, "{place}: no operator died");
            assert_eq!(scene.state(), undisturbed.state(), "{place}");
        }
    }
    let deaths = 2 * names.len();
    (names, deaths)
}
