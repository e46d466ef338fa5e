//! Proof of identity: a node agent proves its node with a token that the API server made for its pod.
//!
//! The token is bound to a pod and to our audience, and the API server's review of it names the node of that
//! pod (`authentication.kubernetes.io/node-name`). That name, not what the request says, decides which pods the
//! agent may report about and resize. Reviews are remembered for a short while under a keyed hash of the token:
//! the token itself is kept nowhere. Refusals are remembered, too, so that a wrong token that is sent again
//! costs no second review.

use super::peers::ConnectionSlot;
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::wire::TOKEN_AUDIENCE;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::Client;
use kube::api::{Api, PostParams};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Kubelets remember an accepted token for the same time, by default.
const ACCEPTED_FOR: Duration = Duration::from_secs(120);
/// Short, because a token may become valid: an API server that has just started may not know its account yet.
const REFUSED_FOR: Duration = Duration::from_secs(10);
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// More than any cluster has nodes.
const MOST_ACCEPTED: usize = 20_000;
const MOST_REFUSED: usize = 4096;
/// How many reviews the API server is asked for at the same time.
const REVIEWS_AT_ONCE: usize = 16;
/// Tokens of ServiceAccounts have one to two kilobytes.
const LONGEST_TOKEN_BYTES: usize = 16 << 10;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AuthError {
    #[error("no token: send the agent's ServiceAccount token as a bearer token")]
    Missing,
    #[error("the token is not accepted: {0}")]
    Rejected(String),
    #[error("the token belongs to {found}; only {wanted} may ask")]
    WrongAccount { found: String, wanted: String },
    #[error(
        "the token does not say on which node its pod runs: it must be a projected token of a pod, on Kubernetes 1.32 or newer"
    )]
    NoNode,
    #[error("the token belongs to a pod on node {proved}, not on {claimed}")]
    OtherNode { proved: NodeName, claimed: NodeName },
    #[error("this address has sent too many tokens that were not accepted: try again in a minute")]
    TooMany,
    #[error("the API server could not review the token: {0}")]
    Unavailable(String),
}

pub(crate) struct Reviewer {
    client: Client,
    /// `system:serviceaccount:<namespace>:<name>`.
    account: String,
    hasher: RandomState,
    remembered: Mutex<ReviewCache>,
    reviews: Semaphore,
}

/// Two hashes of a token under a key that only this process has: 128 bits that a peer cannot aim at.
type TokenHash = (u64, u64);

#[derive(Default)]
struct ReviewCache {
    accepted: HashMap<TokenHash, (NodeName, Instant)>,
    refused: HashMap<TokenHash, (AuthError, Instant)>,
}

impl ReviewCache {
    fn find(&self, hash: &TokenHash, now: Instant) -> Option<Result<NodeName, AuthError>> {
        if let Some((node, _)) = self.accepted.get(hash).filter(|(_, until)| *until > now) {
            return Some(Ok(node.clone()));
        }
        let (error, _) = self.refused.get(hash).filter(|(_, until)| *until > now)?;
        Some(Err(error.clone()))
    }

    fn keep(&mut self, hash: TokenHash, result: &Result<NodeName, AuthError>, now: Instant) {
        match result {
            Ok(node) => {
                make_room(&mut self.accepted, MOST_ACCEPTED, now);
                self.accepted.insert(hash, (node.clone(), now + ACCEPTED_FOR));
            }
            Err(AuthError::Unavailable(_)) => {}
            Err(error) => {
                make_room(&mut self.refused, MOST_REFUSED, now);
                self.refused.insert(hash, (error.clone(), now + REFUSED_FOR));
            }
        }
    }
}

/// Forgets what is over, and everything if that is not enough.
fn make_room<T>(map: &mut HashMap<TokenHash, (T, Instant)>, most: usize, now: Instant) {
    if map.len() >= most {
        map.retain(|_, (_, until)| *until > now);
        if map.len() >= most {
            map.clear();
        }
    }
}

impl Reviewer {
    pub(crate) fn new(client: Client, namespace: &str, service_account: &str) -> Reviewer {
        Reviewer {
            client,
            account: format!("system:serviceaccount:{namespace}:{service_account}"),
            hasher: RandomState::new(),
            remembered: Mutex::default(),
            reviews: Semaphore::new(REVIEWS_AT_ONCE),
        }
    }

    /// The node of the agent whose token this is. A review is paid for by the peer that sent the token.
    pub(crate) async fn node(&self, authorization: Option<&str>, slot: &ConnectionSlot) -> Result<NodeName, AuthError> {
        let token = authorization.and_then(|header| header.strip_prefix("Bearer ")).ok_or(AuthError::Missing)?;
        if token.len() > LONGEST_TOKEN_BYTES {
            return Err(AuthError::Rejected(format!("it is longer than {LONGEST_TOKEN_BYTES} bytes")));
        }
        let hash = (self.hasher.hash_one((0u8, token)), self.hasher.hash_one((1u8, token)));
        if let Some(known) = self.remembered.lock().find(&hash, Instant::now()) {
            return known;
        }
        let _turn = self.reviews.acquire().await.map_err(|error| AuthError::Unavailable(error.to_string()))?;
        // A request with the same token may have been reviewed while this one waited.
        if let Some(known) = self.remembered.lock().find(&hash, Instant::now()) {
            return known;
        }
        if !slot.spend_refusal(Instant::now()) {
            return Err(AuthError::TooMany);
        }
        let result = match self.review(token).await {
            Ok(status) => check_review(&status, &self.account),
            Err(error) => Err(error),
        };
        if matches!(result, Ok(_) | Err(AuthError::Unavailable(_))) {
            slot.refund_refusal();
        }
        self.remembered.lock().keep(hash, &result, Instant::now());
        result
    }

    async fn review(&self, token: &str) -> Result<TokenReviewStatus, AuthError> {
        let review = TokenReview {
            metadata: Default::default(),
            spec: TokenReviewSpec { audiences: Some(vec![TOKEN_AUDIENCE.to_owned()]), token: Some(token.to_owned()) },
            status: None,
        };
        let api: Api<TokenReview> = Api::all(self.client.clone());
        let params = PostParams::default();
        match tokio::time::timeout(REVIEW_TIMEOUT, api.create(&params, &review)).await {
            Ok(Ok(review)) => Ok(review.status.unwrap_or_default()),
            Ok(Err(error)) => Err(AuthError::Unavailable(error.to_string())),
            Err(_) => Err(AuthError::Unavailable("no answer in time".to_owned())),
        }
    }
}

/// The node that a review names, or why the token is not accepted.
fn check_review(status: &TokenReviewStatus, account: &str) -> Result<NodeName, AuthError> {
    if status.authenticated != Some(true) {
        let why = status.error.clone().unwrap_or_else(|| "not authenticated".to_owned());
        return Err(AuthError::Rejected(why.chars().take(200).collect()));
    }
    // An API server that does not know audiences would accept any token.
    if !status.audiences.iter().flatten().any(|audience| audience == TOKEN_AUDIENCE) {
        return Err(AuthError::Rejected(format!("it was not made for the audience {TOKEN_AUDIENCE}")));
    }
    let user = status.user.clone().unwrap_or_default();
    let found = user.username.unwrap_or_default();
    if found != account {
        return Err(AuthError::WrongAccount { found, wanted: account.to_owned() });
    }
    let nodes = user.extra.and_then(|extra| extra.get("authentication.kubernetes.io/node-name").cloned());
    match nodes.as_deref() {
        Some([node]) if !node.is_empty() => Ok(NodeName::from(node.as_str())),
        _ => Err(AuthError::NoNode),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ACCOUNT: &str = "system:serviceaccount:gainshare:gainshare-agent";

    fn reviewed(status: serde_json::Value) -> Result<NodeName, AuthError> {
        check_review(&serde_json::from_value(status).unwrap(), ACCOUNT)
    }

    #[test]
    fn only_an_agents_own_token_for_us_names_a_node() {
        let good = json!({
            "authenticated": true, "audiences": [TOKEN_AUDIENCE],
            "user": {"username": ACCOUNT, "extra": {"authentication.kubernetes.io/node-name": ["node-a"]}},
        });
        assert_eq!(reviewed(good.clone()), Ok("node-a".into()));
        let changed = |path: &[&str], value: serde_json::Value| {
            let mut status = good.clone();
            let place = path.iter().fold(&mut status, |at, key| &mut at[*key]);
            *place = value;
            reviewed(status)
        };
        assert!(matches!(changed(&["authenticated"], json!(false)), Err(AuthError::Rejected(_))));
        assert!(matches!(
            changed(&["audiences"], json!(["https://kubernetes.default.svc"])),
            Err(AuthError::Rejected(_))
        ));
        assert!(matches!(changed(&["audiences"], json!(null)), Err(AuthError::Rejected(_))));
        let other = json!("system:serviceaccount:team:default");
        assert!(matches!(changed(&["user", "username"], other), Err(AuthError::WrongAccount { .. })));
        assert!(matches!(changed(&["user", "extra"], json!({})), Err(AuthError::NoNode)));
        let two = json!({"authentication.kubernetes.io/node-name": ["a", "b"]});
        assert!(matches!(changed(&["user", "extra"], two), Err(AuthError::NoNode)));
    }
}
