//! Bodies of requests that are nearly valid, as bytes: admission reviews and messages of node agents. Each is answered
//! or refused. Nothing panics.

use super::webhook;
use crate::state::agents::Agents;
use gainshare_kube_api::wire::SyncRequest;
use proptest::prelude::*;
use std::time::Instant;

const REVIEWS: [&str; 1] = [r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{
    "uid":"1","kind":{"group":"","version":"v1","kind":"Pod"},"resource":{"group":"","version":"v1","resource":"pods"},
    "requestKind":{"group":"","version":"v1","kind":"Pod"},
    "requestResource":{"group":"","version":"v1","resource":"pods"},
    "name":"p","namespace":"team","operation":"CREATE","userInfo":{},
    "object":{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p","annotations":{}},"spec":{"containers":[
        {"name":"main","image":"i","env":[{"name":"A","value":"b"}],
         "resources":{"requests":{"cpu":"1500m","memory":"1Gi"},"limits":{"cpu":"2"}}},
        {"name":"other","image":"i","envFrom":[{"configMapRef":{"name":"x"}}]}]}},
    "dryRun":false}}"#];

const SYNCS: [&str; 1] = [r#"{"node":"a","epoch":1,"seq":1,"seen":0,"wait_ms":0,
    "beat":{"at_us":1,"cores":4.0,"cpu_used_cores":1.5,"growing":1,"watching":0,"converged":2},
    "jobs":[{"uid":"u","container":"main","category":"growing","growth":0.5,"progress":{"step":3,"value":0.25},
             "share":0.5,"reason":"it grows","signal":{"reports":4,"first":{"value":2.0,"at_us":1}}}],
    "resizes":[{"uid":"u","container":"main","generation":7,"to":{}}]}"#];

/// Pieces that lead deep into the parsers.
const PIECES: [&str; 24] = [
    "0",
    "-1",
    "1e308",
    "-1e308",
    "nan",
    "inf",
    "18446744073709551615",
    "9223372036854775808",
    "0.0000001",
    "\"",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "null",
    "true",
    "\"500m\"",
    "\"1e18Gi\"",
    "\"jobs\":",
    "\"containers\":[]",
    "\"env\":null",
    "€",
];

/// A valid text with some bytes taken out and others put in.
fn damaged(texts: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => proptest::sample::select(PIECES.to_vec()).prop_map(|piece| piece.as_bytes().to_vec()),
        1 => proptest::collection::vec(any::<u8>(), 0..8),
    ];
    let edits = proptest::collection::vec((any::<proptest::sample::Index>(), 0usize..12, piece), 1..6);
    (proptest::sample::select(texts), edits).prop_map(|(text, edits)| {
        let mut bytes = text.as_bytes().to_vec();
        for (at, removed, piece) in edits {
            let at = at.index(bytes.len() + 1);
            let end = (at + removed).min(bytes.len());
            bytes.splice(at..end, piece);
        }
        bytes
    })
}

#[test]
fn the_review_that_is_damaged_is_valid() {
    assert!(webhook::review(REVIEWS[0].as_bytes()).unwrap().changed);
}

proptest! {
    #[test]
    fn any_admission_review_is_answered(body in damaged(&REVIEWS)) {
        match webhook::review(&body) {
            Ok(answer) => {
                let response = answer.review.response.unwrap();
                prop_assert!(response.allowed, "a pod is admitted, whatever the review contains");
            }
            Err(error) => prop_assert!(error.contains("admission review"), "{error}"),
        }
    }

    #[test]
    fn any_body_of_an_agent_is_taken_or_refused(bodies in proptest::collection::vec(damaged(&SYNCS), 1..4)) {
        let (mut agents, now) = (Agents::default(), Instant::now());
        for body in bodies {
            if let Ok(sync) = serde_json::from_slice::<SyncRequest>(&body) {
                let _ = agents.receive(&sync, now, |_| true);
                for resize in &sync.resizes {
                    let _ = agents.admit(&sync.node, sync.epoch, &resize.uid, resize.generation);
                }
            }
        }
        let _ = (agents.counts(now), agents.heard_count(now));
    }
}
