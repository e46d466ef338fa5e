//! When the driver's loop goes on.
//!
//! **Problem.** The loop rests until something is due. A due time that stays in the past, because no round does
//! anything about it, keeps the loop from resting: its thread then uses a whole core.
//!
//! **How.** A part that acts at a moment has one function that names the moment. The loop sleeps until the earliest of
//! these moments, and a round asks the same functions what is to be done. What waits for another thread (the container
//! engine, a kill, a reading of files) has no due time until its answer comes, or that of the next attempt.
//!
//! **Properties.** After a round nothing is due that was due before it, except what the round had no time for: tasks,
//! changed files and starts. See `after_a_round_nothing_is_due`.

use super::{Driver, WATCH_PACE};
use gainshare_core::model::{Span, Time};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

impl Driver {
    /// Sleeps until there is something to do.
    pub(super) fn sleep(&mut self) {
        let now = self.now();
        let until = self.next_wake(now);
        // Files that change at different moments are read in one round.
        let pace = if self.control.policy().react_to_reports { Span::ZERO } else { WATCH_PACE };
        let together = until.min(self.watch.changed_at() + pace);
        let mut has_task = false;
        if together > now {
            let mut fds = [PollFd::new(self.inbox.fd(), PollFlags::POLLIN)];
            has_task = poll(&mut fds, timeout(now, together)).is_ok_and(|ready| ready > 0);
        }
        if !has_task {
            let mut fds = vec![PollFd::new(self.inbox.fd(), PollFlags::POLLIN)];
            fds.extend(self.watch.fd().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
            let _ = poll(&mut fds, timeout(self.now(), until));
        }
        self.inbox.clear_wake();
    }

    /// When the next round begins, if no task comes and no file changes before.
    fn next_wake(&self, now: Time) -> Time {
        let has_more = !self.plans.due.is_empty() || self.inbox.has_more() || self.watch.has_more();
        let parts = [has_more.then_some(now), self.decision_due(now), self.teams.check_due(), self.gpus.next_reading];
        let jobs = self.jobs.values().flat_map(|job| [job.reading_due(), job.stop_due(), job.kill_due()]);
        parts.into_iter().chain(jobs).flatten().fold(self.timeline.next_beat, Ord::min)
    }
}

/// Rounded up: waking a fraction of a millisecond early would only mean to sleep again.
fn timeout(now: Time, until: Time) -> PollTimeout {
    let ms = until.since(now).0.div_ceil(1000);
    PollTimeout::from(u16::try_from(ms).unwrap_or(u16::MAX))
}

#[cfg(test)]
mod tests {
    use super::super::{Ending, Job};
    use super::*;
    use crate::record::JobRecord;
    use crate::spec::JobSpec;
    use crate::types::JobState;
    use gainshare_core::model::JobId;
    use gainshare_limits::RuntimeKind;
    use std::path::Path;

    const CONTAINER: JobId = JobId(1);

    /// A driver with a container whose engine is not there, after its first decision. Its next beat and its next
    /// reading are far away.
    fn driver_with_container(dir: &Path) -> Driver {
        let mut driver = Driver::without_runtimes(dir);
        let spec = JobSpec {
            command: vec!["train".into()],
            name: Some("job".into()),
            runtime: RuntimeKind::Docker,
            image: Some("image:1".into()),
            ..JobSpec::default()
        };
        let record = JobRecord::queued(CONTAINER, spec, "me".into(), driver.clock.moment());
        driver.enter(vec![record], Vec::new()).unwrap_or_else(|refusal| panic!("{}", refusal.message));
        job(&mut driver).record.state = JobState::Running;
        driver.follow(CONTAINER);
        assert!(job(&mut driver).reports.is_some(), "its output is followed");
        let later = driver.now() + Span::from_secs(3600);
        driver.timeline.next_beat = later;
        due_before_and_after_a_round(&mut driver);
        job(&mut driver).next_read = later;
        driver
    }

    fn job(driver: &mut Driver) -> &mut Job {
        driver.jobs.get_mut(&CONTAINER).expect("the job is there")
    }

    /// Runs a round. Whether something was due when it began, and whether the same moment still is.
    fn due_before_and_after_a_round(driver: &mut Driver) -> (bool, bool) {
        let begun = driver.now();
        let before = driver.next_wake(begun) <= begun;
        assert!(!driver.round(), "the daemon goes on");
        (before, driver.next_wake(begun) <= begun)
    }

    #[test]
    fn after_a_round_nothing_is_due() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut driver = driver_with_container(dir.path());
        let now = driver.now();
        type MakeDue = fn(&mut Driver, Time);
        let make_due: [(&str, MakeDue); 7] = [
            ("a reading of its files", |driver, now| job(driver).next_read = now),
            ("new output", |driver, _| (job(driver).dirty, job(driver).last_read) = (true, Time::ZERO)),
            ("a kill, for which the engine is missing", |driver, now| job(driver).kill_at = Some(now)),
            ("a stop that the engine did not take", |driver, now| job(driver).stop_again_at = Some(now)),
            ("a decision", |driver, _| driver.plans.is_wanted = true),
            ("a reading of jobs that share a GPU", |driver, now| driver.gpus.next_reading = Some(now)),
            ("a look at jobs on one core", |driver, now| {
                (driver.teams.has_serial_jobs, driver.teams.next_check) = (true, now);
            }),
        ];
        for (what, make_due) in make_due {
            make_due(&mut driver, now);
            assert_eq!(due_before_and_after_a_round(&mut driver), (true, false), "{what}");
        }
    }

    #[test]
    fn nothing_is_due_while_the_daemon_waits_for_its_jobs_to_end() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut driver = driver_with_container(dir.path());
        driver.timeline.ending = Some(Ending { stop_jobs: true, since: driver.now() });
        // As after the end of another job. A daemon that ends decides nothing.
        driver.plans.is_wanted = true;
        assert_eq!(due_before_and_after_a_round(&mut driver), (false, false));
        job(&mut driver).kill_at = Some(driver.now());
        assert_eq!(due_before_and_after_a_round(&mut driver), (true, false), "a kill");
    }
}
