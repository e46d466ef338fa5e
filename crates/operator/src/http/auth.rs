//! Who is asking: an agent proves itself with a token that the API server made for its pod.
//!
//! The token is bound to a pod and to our audience, and the API server's review of it names the node of that pod
//! (`authentication.kubernetes.io/node-name`). That name, not what the request says, decides which pods the agent may ask about. Reviews
//! are remembered for a short while under a keyed hash of the token: the token itself is kept nowhere.

use gainshare_kube_api::wire::TOKEN_AUDIENCE;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::Client;
use kube::api::{Api, PostParams};
use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// As long as kubelets remember, by default, whom they let in.
const REMEMBERED_FOR: Duration = Duration::from_secs(120);
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// More than any cluster has nodes; beyond it, somebody is guessing tokens and the memory is emptied.
const MOST_REMEMBERED: usize = 20_000;

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
    OtherNode { proved: String, claimed: String },
    #[error("the API server could not review the token: {0}")]
    Unavailable(String),
}

pub(crate) struct Reviewer {
    client: Client,
    /// `system:serviceaccount:<namespace>:<name>`.
    account: String,
    hasher: RandomState,
    remembered: Mutex<BTreeMap<(u64, u64), (String, Instant)>>,
}

impl Reviewer {
    pub(crate) fn new(client: Client, namespace: &str, service_account: &str) -> Reviewer {
        Reviewer {
            client,
            account: format!("system:serviceaccount:{namespace}:{service_account}"),
            hasher: RandomState::new(),
            remembered: Mutex::default(),
        }
    }

    /// The node of the agent whose token this is.
    pub(crate) async fn node(&self, authorization: Option<&str>) -> Result<String, AuthError> {
        let token = authorization.and_then(|header| header.strip_prefix("Bearer ")).ok_or(AuthError::Missing)?;
        // Two hashes under a key that only this process has: 128 bits nobody can aim at.
        let key = (self.hasher.hash_one((0u8, token)), self.hasher.hash_one((1u8, token)));
        let now = Instant::now();
        if let Some((node, until)) = self.remembered.lock().expect("never poisoned").get(&key)
            && *until > now
        {
            return Ok(node.clone());
        }
        let node = judge(&self.review(token).await?, &self.account)?;
        let mut remembered = self.remembered.lock().expect("never poisoned");
        if remembered.len() >= MOST_REMEMBERED {
            remembered.clear();
        }
        remembered.retain(|_, (_, until)| *until > now);
        remembered.insert(key, (node.clone(), now + REMEMBERED_FOR));
        Ok(node)
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

/// What a review says about an agent.
fn judge(status: &TokenReviewStatus, account: &str) -> Result<String, AuthError> {
    if status.authenticated != Some(true) {
        let why = status.error.clone().unwrap_or_else(|| "not authenticated".to_owned());
        return Err(AuthError::Rejected(why));
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
        Some([node]) if !node.is_empty() => Ok(node.clone()),
        _ => Err(AuthError::NoNode),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ACCOUNT: &str = "system:serviceaccount:gainshare:gainshare-agent";

    fn judged(status: serde_json::Value) -> Result<String, AuthError> {
        judge(&serde_json::from_value(status).unwrap(), ACCOUNT)
    }

    #[test]
    fn only_an_agents_own_token_for_us_names_a_node() {
        let good = json!({
            "authenticated": true, "audiences": ["gainshare-manager"],
            "user": {"username": ACCOUNT, "extra": {"authentication.kubernetes.io/node-name": ["node-a"]}},
        });
        assert_eq!(judged(good.clone()), Ok("node-a".into()));
        let changed = |path: &[&str], value: serde_json::Value| {
            let mut status = good.clone();
            let place = path.iter().fold(&mut status, |at, key| &mut at[*key]);
            *place = value;
            judged(status)
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
