//! Bodies of requests that are nearly valid, as bytes: admission reviews and messages of node agents. Each is answered
//! or refused. Nothing panics.

use super::inside::Addition;
use super::webhook;
use crate::state::agents::Agents;
use gainshare_core::fixtures::damaged;
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

/// Pieces of messages that lead deep into the parsers.
const PIECES: [&str; 6] = [":", "\"500m\"", "\"1e18Gi\"", "\"jobs\":", "\"containers\":[]", "\"env\":null"];

#[test]
fn the_review_that_is_damaged_is_valid() {
    assert!(webhook::review(REVIEWS[0].as_bytes()).unwrap().changed);
}

proptest! {
    #[test]
    fn any_admission_review_is_answered(seed in any::<u64>()) {
        let body = damaged(&REVIEWS, &PIECES, seed);
        let addition = Addition { image: "gainshare:1", least: (0, 0), paces_gpu_work: true };
        for answer in [webhook::review(&body), webhook::review_with(&body, |_, pod| addition.add(pod))] {
            match answer {
                Ok(answer) => {
                    let response = answer.review.response.unwrap();
                    prop_assert!(response.allowed, "a pod is admitted, whatever the review contains");
                }
                Err(error) => prop_assert!(error.contains("admission review"), "{error}"),
            }
        }
    }

    #[test]
    fn any_body_of_an_agent_is_taken_or_refused(seeds in proptest::collection::vec(any::<u64>(), 1..4)) {
        let (mut agents, now) = (Agents::default(), Instant::now());
        for seed in seeds {
            let body = damaged(&SYNCS, &PIECES, seed);
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
