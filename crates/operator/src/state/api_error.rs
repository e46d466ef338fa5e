//! Answers of the API server that need more than their code to be understood.

use kube::core::Status;

/// Whether the operator's account lacks a right. The code 403 also stands for refusals by quotas and admission
/// policies, whose messages do not name a user. An API server that has just started does not know our rights yet, so
/// a missing right is worth another try.
pub(crate) fn lacks_right(status: &Status) -> bool {
    status.code == 403 && status.message.contains("forbidden: User ")
}
