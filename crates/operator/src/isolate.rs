//! Keeps a panic that one object causes from stopping the work on all others.
//!
//! Objects come from tenants. The code that reads them is written so that no object can make it
//! panic; this module is the second line of defence. [`catch`] and [`catch_future`] turn a panic
//! into a message, and [`rest_after`] answers how long the object rests before it is tried again.

use futures_util::FutureExt;
use gainshare_core::backoff::Backoff;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

const RESTS: Backoff = Backoff::new(Duration::from_secs(5), Duration::from_secs(320));

/// The text of a panic.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Runs `work` on one object. A panic becomes an error with its message.
///
/// The caller may have locks without poison and maps that `work` changes. Both stay usable after a
/// panic; at worst the object that caused it is missing from a derived map until its next change.
pub(crate) fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| message(&*payload))
}

/// Runs `work` on one object of a kind. A panic is logged, and the object is skipped.
pub(crate) fn skip_on_panic<T>(kind: &str, name: &str, work: impl FnOnce() -> T) -> Option<T> {
    match catch(work) {
        Ok(result) => Some(result),
        Err(panic) => {
            tracing::error!(kind, name, panic, "an object made the operator panic: it is skipped");
            None
        }
    }
}

/// The same as [`catch`], for asynchronous work.
pub(crate) async fn catch_future<T>(work: impl Future<Output = T>) -> Result<T, String> {
    AssertUnwindSafe(work).catch_unwind().await.map_err(|payload| message(&*payload))
}

/// How long an object rests after its reconcile panicked this number of times in a row.
pub(crate) fn rest_after(times: u32) -> Duration {
    RESTS.pause_after(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_message() {
        assert_eq!(catch(|| 1), Ok(1));
        assert_eq!(catch(|| -> u8 { panic!("attempt {} overflows", 3) }), Err("attempt 3 overflows".to_owned()));
        assert_eq!(catch(|| -> u8 { std::panic::panic_any(7) }), Err("a panic without a message".to_owned()));
        assert_eq!(skip_on_panic("Pod", "p", || -> u8 { panic!("x") }), None);
    }

    #[tokio::test]
    async fn also_in_asynchronous_work() {
        let work = async {
            tokio::task::yield_now().await;
            panic!("after a wait")
        };
        assert_eq!(catch_future::<()>(work).await, Err("after a wait".to_owned()));
    }

    #[test]
    fn rests_grow_and_are_bounded() {
        assert_eq!([1, 2, 7, 8, u32::MAX].map(|times| rest_after(times).as_secs()), [5, 10, 320, 320, 320]);
        assert_eq!(rest_after(0), rest_after(1));
    }
}
