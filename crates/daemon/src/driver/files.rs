//! Reads the files in jobs' own folders, on threads beside the driver's.
//!
//! **Problem.** The folder of a job may be on a network or FUSE file system that does not answer for minutes. The
//! driver must renew its lease meanwhile, and the files of all other jobs must be read.
//!
//! **How.** Requests wait in one queue, and one thread reads them in order. A read that has not come back after
//! [`PATIENCE`] is *stuck*: another thread takes the queue over, and the first one ends when its read returns. Requests
//! for the folder of a stuck read stay in the queue. Once half of [`MAX_READERS`] threads are stuck, requests for the
//! device of a stuck read stay there, too. When all threads are stuck, every request waits until one of them returns.
//!
//! **Properties.** There are never more than [`MAX_READERS`] threads. A job has at most one request, because the
//! request contains its files. The result of a request that was cancelled is dropped here, because closing a file may
//! block as well.

use super::DriverHandle;
use gainshare_core::model::JobId;
use gainshare_progress::{FileTask, FilesReading, FolderListings, RunLength, contain_panic};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A read that takes longer is stuck. The slowest healthy file systems answer in less than a second.
const PATIENCE: Duration = Duration::from_secs(3);

/// Threads that read, stuck ones included.
const MAX_READERS: usize = 8;

/// With this many stuck threads, whole devices are left alone.
const MANY_STUCK: usize = MAX_READERS / 2;

/// What is to be read for one job.
pub(super) struct FileRequest {
    pub(super) folder: PathBuf,
    /// The command whose configuration file may name the length of the run.
    pub(super) command: Option<Vec<String>>,
    pub(super) task: Option<FileTask>,
    /// Set when the result is not wanted any more.
    pub(super) is_cancelled: Arc<AtomicBool>,
}

/// What was read.
pub(super) struct FileAnswer {
    pub(super) run_length: Option<RunLength>,
    pub(super) reading: Option<FilesReading>,
}

impl FileRequest {
    fn read(self, listings: &mut FolderListings) -> FileAnswer {
        let folder = Some(self.folder.as_path());
        let length = |command: Vec<String>| contain_panic(|| RunLength::read(&command, folder)).unwrap_or_default();
        FileAnswer { run_length: self.command.map(length), reading: self.task.map(|task| task.read(listings)) }
    }

    fn device(&self) -> Option<u64> {
        self.task.as_ref().and_then(FileTask::device)
    }
}

/// The threads and their queue.
pub(super) struct FileReaders {
    shared: Arc<SharedQueue>,
    handle: DriverHandle,
}

#[derive(Default)]
struct SharedQueue {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<(JobId, FileRequest)>,
    readers: BTreeMap<u64, Reader>,
    next_reader: u64,
    is_closed: bool,
}

/// One thread.
#[derive(Default)]
struct Reader {
    read: Option<Read>,
    /// Another thread has taken the queue over.
    is_replaced: bool,
}

/// What a thread reads at the moment.
struct Read {
    job: JobId,
    folder: PathBuf,
    device: Option<u64>,
    since: Instant,
}

impl Read {
    fn is_stuck(&self) -> bool {
        self.since.elapsed() >= PATIENCE
    }
}

impl Queue {
    fn stuck(&self) -> Vec<&Read> {
        self.readers.values().filter_map(|reader| reader.read.as_ref()).filter(|read| read.is_stuck()).collect()
    }

    /// Whether a request must wait for a stuck read.
    fn is_blocked(stuck: &[&Read], folder: &Path, device: Option<u64>) -> bool {
        let is_many = stuck.len() >= MANY_STUCK && device.is_some();
        stuck.iter().any(|read| read.folder == folder || (is_many && read.device == device))
    }

    /// Takes the first request that need not wait.
    fn take(&mut self) -> Option<(JobId, FileRequest)> {
        let stuck = self.stuck();
        let is_free =
            |(_, request): &(JobId, FileRequest)| !Queue::is_blocked(&stuck, &request.folder, request.device());
        let place = self.requests.iter().position(is_free)?;
        self.requests.remove(place)
    }

    /// Whether a thread is there that will take the next request.
    fn has_active_reader(&self) -> bool {
        self.readers.values().any(|reader| !reader.is_replaced)
    }
}

impl SharedQueue {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next request of the thread `number`; `None`: the thread ends.
    fn next(&self, number: u64) -> Option<(JobId, FileRequest)> {
        let mut queue = self.lock();
        loop {
            if queue.is_closed || queue.readers.get(&number).is_none_or(|reader| reader.is_replaced) {
                queue.readers.remove(&number);
                self.changed.notify_all();
                return None;
            }
            if let Some((job, request)) = queue.take() {
                let (folder, device) = (request.folder.clone(), request.device());
                if let Some(reader) = queue.readers.get_mut(&number) {
                    reader.read = Some(Read { job, folder, device, since: Instant::now() });
                }
                return Some((job, request));
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The read of the thread `number` has returned. Requests for the same folder need not wait any more.
    fn finished(&self, number: u64) {
        if let Some(reader) = self.lock().readers.get_mut(&number) {
            reader.read = None;
        }
        self.changed.notify_all();
    }
}

impl FileReaders {
    pub(super) fn new(handle: DriverHandle) -> FileReaders {
        FileReaders { shared: Arc::default(), handle }
    }

    /// Has the files of a job read. The answer comes as a task, unless the request is cancelled.
    pub(super) fn send(&self, job: JobId, request: FileRequest) {
        let is_served = {
            let mut queue = self.shared.lock();
            queue.requests.push_back((job, request));
            queue.has_active_reader()
        };
        if is_served {
            self.shared.changed.notify_all();
        } else {
            self.start();
        }
    }

    /// Replaces a thread that is stuck. To be called about once a second. Returns the jobs whose files cannot be read
    /// at the moment.
    pub(super) fn replace_stuck(&self) -> BTreeSet<JobId> {
        let (jobs, wants_reader) = {
            let mut queue = self.shared.lock();
            let is_full = queue.readers.len() >= MAX_READERS;
            if !is_full {
                let is_stuck = |reader: &&mut Reader| reader.read.as_ref().is_some_and(Read::is_stuck);
                queue.readers.values_mut().filter(is_stuck).for_each(|reader| reader.is_replaced = true);
            }
            let stuck = queue.stuck();
            let all_wait = is_full && stuck.len() == queue.readers.len();
            let waits = |(_, request): &&(JobId, FileRequest)| {
                all_wait || Queue::is_blocked(&stuck, &request.folder, request.device())
            };
            let waiting = queue.requests.iter().filter(waits).map(|(job, _)| *job);
            let jobs: BTreeSet<JobId> = stuck.iter().map(|read| read.job).chain(waiting).collect();
            (jobs, !is_full && !queue.requests.is_empty() && !queue.has_active_reader())
        };
        if wants_reader {
            self.start();
        }
        jobs
    }

    /// Whether every thread is stuck, so that no job's files are read.
    pub(super) fn are_all_stuck(&self) -> bool {
        let queue = self.shared.lock();
        queue.stuck().len() >= MAX_READERS
    }

    fn start(&self) {
        let number = {
            let mut queue = self.shared.lock();
            if queue.readers.len() >= MAX_READERS {
                return;
            }
            let number = queue.next_reader;
            queue.next_reader += 1;
            queue.readers.insert(number, Reader::default());
            number
        };
        if let Err(e) = self.spawn(number) {
            // Tried again at the next beat.
            tracing::warn!("cannot start a thread that reads jobs' files: {e}");
            self.shared.lock().readers.remove(&number);
        }
    }

    fn spawn(&self, number: u64) -> io::Result<()> {
        let (shared, handle) = (self.shared.clone(), self.handle.clone());
        let sentinel = handle.sentinel("the reader of jobs' files");
        let work = move || {
            let mut listings = FolderListings::default();
            while let Some((job, request)) = shared.next(number) {
                let ticket = request.is_cancelled.clone();
                let is_wanted = || !ticket.load(Ordering::Acquire);
                let answer = is_wanted().then(|| request.read(&mut listings));
                if let Some(answer) = answer.filter(|_| is_wanted()) {
                    let ticket = ticket.clone();
                    handle.send(move |driver| driver.files_read(job, &ticket, answer));
                }
                shared.finished(number);
            }
            sentinel.disarm();
        };
        std::thread::Builder::new().name("job-files".into()).stack_size(1 << 20).spawn(work).map(drop)
    }
}

impl Drop for FileReaders {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(folder: &str) -> FileRequest {
        FileRequest { folder: folder.into(), command: None, task: None, is_cancelled: Arc::default() }
    }

    fn read(folder: &str, device: u64, age: Duration) -> Reader {
        let since = Instant::now().checked_sub(age).unwrap();
        let read = Read { job: JobId(1), folder: folder.into(), device: Some(device), since };
        Reader { read: Some(read), is_replaced: true }
    }

    #[test]
    fn requests_for_the_folder_of_a_stuck_read_stay_in_the_queue() {
        let mut queue = Queue::default();
        queue.requests.extend([(JobId(1), request("/hung")), (JobId(2), request("/fine"))]);
        queue.readers.insert(0, read("/hung", 7, PATIENCE));
        assert_eq!(queue.take().map(|(job, _)| job), Some(JobId(2)));
        assert!(queue.take().is_none());
        queue.readers.insert(0, read("/hung", 7, Duration::ZERO));
        assert_eq!(queue.take().map(|(job, _)| job), Some(JobId(1)), "a short read blocks nothing");
    }

    #[test]
    fn many_stuck_reads_block_their_device() {
        let readers: Vec<Reader> = (0..MANY_STUCK).map(|i| read(&format!("/hung/{i}"), 7, PATIENCE)).collect();
        let stuck: Vec<&Read> = readers.iter().filter_map(|reader| reader.read.as_ref()).collect();
        assert!(Queue::is_blocked(&stuck, Path::new("/hung/other"), Some(7)));
        assert!(!Queue::is_blocked(&stuck[1..], Path::new("/hung/other"), Some(7)));
        assert!(!Queue::is_blocked(&stuck, Path::new("/fine"), Some(8)));
        assert!(!Queue::is_blocked(&stuck, Path::new("/unknown"), None));
    }
}
