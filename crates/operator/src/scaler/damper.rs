//! Values that count only after they have stayed the same for some passes. Pure: passes are the clock.

use std::collections::{BTreeMap, BTreeSet};

/// A new or another value counts after this number of passes in a row.
pub(super) const PASSES_TO_APPEAR: u32 = 4;

/// A value is withdrawn after this number of passes without one.
pub(super) const PASSES_TO_VANISH: u32 = 6;

/// The values that count, by their keys.
#[derive(Debug, Clone)]
pub(super) struct Damper<K, V> {
    values: BTreeMap<K, V>,
    /// What was observed instead of the value that counts, and in how many passes in a row.
    candidates: BTreeMap<K, (Option<V>, u32)>,
}

impl<K: Clone + Ord, V: Clone + PartialEq> Damper<K, V> {
    /// Goes on where an earlier damper ended.
    pub(super) fn with(values: BTreeMap<K, V>) -> Damper<K, V> {
        Damper { values, candidates: BTreeMap::new() }
    }

    pub(super) fn values(&self) -> &BTreeMap<K, V> {
        &self.values
    }

    /// Takes in the values of one pass. Answers the keys whose value has changed.
    pub(super) fn observe(&mut self, seen: &BTreeMap<K, V>) -> Vec<K> {
        let keys: BTreeSet<K> = self.values.keys().chain(seen.keys()).cloned().collect();
        let mut changed = Vec::new();
        for key in keys {
            let value = seen.get(&key);
            if value == self.values.get(&key) {
                self.candidates.remove(&key);
                continue;
            }
            let candidate = self.candidates.entry(key.clone()).or_insert_with(|| (value.cloned(), 0));
            if candidate.0.as_ref() != value {
                *candidate = (value.cloned(), 0);
            }
            candidate.1 += 1;
            let passes = if value.is_some() { PASSES_TO_APPEAR } else { PASSES_TO_VANISH };
            if candidate.1 >= passes {
                self.candidates.remove(&key);
                match value {
                    Some(value) => self.values.insert(key.clone(), value.clone()),
                    None => self.values.remove(&key),
                };
                changed.push(key);
            }
        }
        self.candidates.retain(|key, _| seen.contains_key(key) || self.values.contains_key(key));
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(value: Option<u32>) -> BTreeMap<String, u32> {
        value.into_iter().map(|value| ("a".to_owned(), value)).collect()
    }

    /// The keys that change in the last of `count` passes with the same value; none before that.
    fn passes(damper: &mut Damper<String, u32>, value: Option<u32>, count: u32) -> Vec<String> {
        for _ in 1..count {
            assert_eq!(damper.observe(&needs(value)), [""; 0]);
        }
        damper.observe(&needs(value))
    }

    #[test]
    fn a_need_counts_after_some_passes_and_goes_after_more() {
        let mut damper = Damper::with(BTreeMap::new());
        assert_eq!(passes(&mut damper, Some(2), PASSES_TO_APPEAR), ["a"]);
        assert_eq!(damper.values(), &needs(Some(2)));
        assert_eq!(passes(&mut damper, Some(2), 20), [""; 0], "no second change");
        assert_eq!(passes(&mut damper, Some(3), PASSES_TO_APPEAR), ["a"]);
        assert_eq!(passes(&mut damper, None, PASSES_TO_VANISH), ["a"]);
        assert!(damper.values().is_empty());
    }

    #[test]
    fn a_need_that_flickers_changes_nothing() {
        let mut damper = Damper::with(needs(Some(1)));
        for pass in 0..100 {
            let value = [Some(1), None, Some(2), None, None][pass % 5];
            assert_eq!(damper.observe(&needs(value)), [""; 0], "pass {pass}");
        }
        for pass in 0..100 {
            let value = if pass % 2 == 0 { Some(2) } else { Some(3) };
            assert_eq!(damper.observe(&needs(value)), [""; 0], "pass {pass}");
        }
        assert_eq!(damper.values(), &needs(Some(1)));
        let mut empty = Damper::with(BTreeMap::new());
        (0..100).for_each(|pass| assert_eq!(empty.observe(&needs((pass % 2 == 0).then_some(1))), [""; 0]));
    }

    #[test]
    fn nothing_is_remembered_of_keys_that_are_gone() {
        let mut damper = Damper::with(BTreeMap::new());
        damper.observe(&needs(Some(1)));
        damper.observe(&needs(None));
        assert!(damper.candidates.is_empty());
    }
}
