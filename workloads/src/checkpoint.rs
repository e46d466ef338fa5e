//! Checkpoints that survive a kill at any moment.
//!
//! **Files.** A checkpoint is one safetensors file, `attempt-A.step-S.safetensors`. It is written under a
//! temporary name and synced, then renamed, and then the directory is synced. A name therefore has its whole
//! file or does not exist. The metadata of the file hold a SHA-256 of all content, so that later damage is
//! noticed too. Loading takes the newest file with the right hash, and reports the files that it skipped. The
//! previous checkpoint is kept until the next one is complete.
//!
//! **Fencing.** At most one run may write to a directory. Each run claims the directory when it starts: it
//! writes its attempt number and a unique owner name to `fence.json`. A run of an older attempt cannot claim
//! the directory. A run can no longer save after another run of a newer or the same attempt has claimed it.
//! Claims and saves hold a lock on a file, so that no other run writes between the check of the fence and the
//! save.
//!
//! **Properties**, each a test: `saved_state_comes_back`, `damaged_files_are_skipped`, `previous_is_kept`,
//! `older_attempt_is_fenced`, `failed_save_keeps_the_previous`.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const FENCE: &str = "fence.json";
const LOCK: &str = ".lock";
const TEMPORARY: &str = ".saving";
/// A save takes milliseconds; a process that holds the lock for longer is stopped or hangs.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// The values of one parameter or of one of its moments.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Array {
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// Everything that a run continues from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct State {
    pub(crate) step: u64,
    /// The setup of the run: values of options, by name.
    pub(crate) settings: BTreeMap<String, String>,
    pub(crate) arrays: BTreeMap<String, Array>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    #[error("cannot {doing} {}: {error}; {remedy}", path.display())]
    Io { doing: &'static str, path: PathBuf, error: io::Error, remedy: &'static str },
    #[error("{} is damaged ({why})", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error(
        "attempt {mine} may not write to {}: attempt {theirs} owns it; \
         stop this run, or start it with a higher --attempt or another --checkpoint directory",
        dir.display()
    )]
    OlderAttempt { dir: PathBuf, mine: u64, theirs: u64 },
    #[error(
        "{} was taken over by another run of attempt {attempt}; \
         stop one of the two or give each its own --checkpoint directory",
        dir.display()
    )]
    TakenOver { dir: PathBuf, attempt: u64 },
    #[error("{} is locked by another process; see who with `fuser {}`", path.display(), path.display())]
    Locked { path: PathBuf },
}

impl CheckpointError {
    /// Whether another run owns the directory now, so that this run can save nothing more.
    pub(crate) fn is_fenced(&self) -> bool {
        matches!(self, CheckpointError::OlderAttempt { .. } | CheckpointError::TakenOver { .. })
    }
}

/// Turns an I/O error into one that names the path and the remedy.
fn io_error<'a>(doing: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> CheckpointError + 'a {
    move |error| {
        let remedy = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "free some space or choose another --checkpoint directory"
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "make it writable or choose another --checkpoint directory"
            }
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                "choose a --checkpoint path that is a directory"
            }
            _ => "check the --checkpoint directory",
        };
        CheckpointError::Io { doing, path: path.to_owned(), error, remedy }
    }
}

/// The run that may write to a directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Fence {
    attempt: u64,
    owner: String,
}

/// A directory of checkpoints, claimed by this run.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    fence: Fence,
    /// The newest files that are known to be whole, the newest last; the next save keeps them.
    recent_whole: Vec<PathBuf>,
    /// How many checkpoints before the newest one are kept.
    keep_previous: usize,
}

impl Store {
    /// Creates the directory if needed and claims it for this run.
    pub(crate) fn claim(dir: &Path, attempt: u64) -> Result<Self, CheckpointError> {
        fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let owner = format!("{}-{}", std::process::id(), moment.as_nanos());
        let store =
            Store { dir: dir.to_owned(), fence: Fence { attempt, owner }, recent_whole: vec![], keep_previous: 1 };
        let _lock = store.lock()?;
        // The attempts of the files count as well, because a user may have removed the fence.
        let by_files = store.list_files()?.iter().map(|file| file.attempt).max();
        let theirs = store.read_fence()?.map(|fence| fence.attempt).max(by_files).unwrap_or(0);
        if attempt < theirs {
            return Err(CheckpointError::OlderAttempt { dir: dir.to_owned(), mine: attempt, theirs });
        }
        let content = serde_json::to_vec(&store.fence).expect("two plain fields are always JSON");
        store.write_synced(FENCE, &content)?;
        Ok(store)
    }

    /// Loads the newest whole checkpoint; `skipped` is called for every newer one that is damaged.
    pub(crate) fn load_newest(
        &mut self,
        mut skipped: impl FnMut(CheckpointError),
    ) -> Result<Option<(PathBuf, State)>, CheckpointError> {
        for file in self.list_files()? {
            let path = self.dir.join(&file.name);
            let content = fs::read(&path).map_err(io_error("read", &path))?;
            match decode(&content) {
                Ok(state) => {
                    self.recent_whole = vec![path.clone()];
                    return Ok(Some((path, state)));
                }
                Err(why) => skipped(CheckpointError::Damaged { path, why }),
            }
        }
        Ok(None)
    }

    /// Saves a state. Until this returns without an error, the previous checkpoint is the newest.
    pub(crate) fn save(&mut self, state: &State) -> Result<PathBuf, CheckpointError> {
        let content = encode(state, self.fence.attempt);
        let _lock = self.lock()?;
        match self.read_fence()? {
            Some(fence) if fence.attempt > self.fence.attempt => {
                let (mine, theirs) = (self.fence.attempt, fence.attempt);
                return Err(CheckpointError::OlderAttempt { dir: self.dir.clone(), mine, theirs });
            }
            Some(fence) if fence != self.fence => {
                return Err(CheckpointError::TakenOver { dir: self.dir.clone(), attempt: fence.attempt });
            }
            _ => {}
        }
        let file = FileName::new(self.fence.attempt, state.step);
        let path = self.write_synced(&file.name, &content)?;
        self.recent_whole.retain(|recent| *recent != path);
        self.recent_whole.push(path.clone());
        let surplus = self.recent_whole.len().saturating_sub(self.keep_previous + 1);
        self.recent_whole.drain(..surplus);
        self.prune(&self.recent_whole);
        Ok(path)
    }

    /// Keeps this many checkpoints before the newest one. Files that are there already count.
    pub(crate) fn keep_previous(&mut self, count: usize) -> Result<(), CheckpointError> {
        self.keep_previous = count;
        let files = self.list_files()?;
        self.recent_whole = files.iter().take(count + 1).rev().map(|file| self.dir.join(&file.name)).collect();
        Ok(())
    }

    /// The steps that have a checkpoint, the newest first. A file may still turn out to be damaged.
    pub(crate) fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        Ok(self.list_files()?.iter().map(|file| file.step).collect())
    }

    /// Goes back to the checkpoint of `step` and removes all later ones. `None`: there is none for this step.
    pub(crate) fn go_back(&mut self, step: u64) -> Result<Option<State>, CheckpointError> {
        let files = self.list_files()?;
        let mut restored = None;
        if let Some(file) = files.iter().find(|file| file.step == step) {
            let path = self.dir.join(&file.name);
            let content = fs::read(&path).map_err(io_error("read", &path))?;
            restored = Some(decode(&content).map_err(|why| CheckpointError::Damaged { path, why })?);
        }
        // Without a checkpoint only the start can be gone back to; the caller knows the state there.
        if restored.is_some() || step == 0 {
            for file in files.iter().filter(|file| file.step > step) {
                let path = self.dir.join(&file.name);
                fs::remove_file(&path).map_err(io_error("remove", &path))?;
                self.recent_whole.retain(|recent| *recent != path);
            }
        }
        Ok(restored)
    }

    /// Removes all checkpoints but these. A file that cannot be removed now is removed after the next save.
    fn prune(&self, keep: &[PathBuf]) {
        let old = self.list_files().unwrap_or_default();
        for path in old.iter().map(|file| self.dir.join(&file.name)) {
            if !keep.contains(&path) {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// The checkpoints in the directory, newest first: by attempt, then by step.
    fn list_files(&self) -> Result<Vec<FileName>, CheckpointError> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(io_error("list", &self.dir))? {
            let name = entry.map_err(io_error("list", &self.dir))?.file_name();
            files.extend(name.to_str().and_then(FileName::parse));
        }
        files.sort_by_key(|file| std::cmp::Reverse((file.attempt, file.step)));
        Ok(files)
    }

    fn read_fence(&self) -> Result<Option<Fence>, CheckpointError> {
        let path = self.dir.join(FENCE);
        match fs::read(&path) {
            Ok(content) => serde_json::from_slice(&content).map(Some).map_err(|error| CheckpointError::Damaged {
                path,
                why: format!("{error}; remove it if no other run uses the directory"),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_error("read", &path)(error)),
        }
    }

    /// Locks the directory for a claim or a save. The kernel releases the lock when the file is closed or the
    /// process ends.
    fn lock(&self) -> Result<File, CheckpointError> {
        let path = self.dir.join(LOCK);
        let file = File::options().create(true).append(true).open(&path).map_err(io_error("open", &path))?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if started.elapsed() < LOCK_TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => return Err(CheckpointError::Locked { path }),
                Err(TryLockError::Error(error)) => return Err(io_error("lock", &path)(error)),
            }
        }
    }

    /// Writes a file under a temporary name, syncs it, renames it and syncs the directory. The caller holds the
    /// lock, so one temporary name is enough. The next save overwrites a temporary file that a killed save has
    /// left.
    fn write_synced(&self, name: &str, content: &[u8]) -> Result<PathBuf, CheckpointError> {
        let temporary = self.dir.join(TEMPORARY);
        let path = self.dir.join(name);
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(content)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(|error| {
            // The disk may be full, and an incomplete file is of no use.
            let _ = fs::remove_file(&temporary);
            io_error("save", &path)(error)
        })?;
        Ok(path)
    }
}

/// The parts of the file name of a checkpoint.
#[derive(Debug)]
struct FileName {
    attempt: u64,
    step: u64,
    name: String,
}

impl FileName {
    fn new(attempt: u64, step: u64) -> Self {
        FileName { attempt, step, name: format!("attempt-{attempt}.step-{step}.safetensors") }
    }

    /// Accepts only names that [`FileName::new`] gives, so that pruning never removes a file of the user.
    fn parse(name: &str) -> Option<Self> {
        let (attempt, rest) = name.strip_prefix("attempt-")?.split_once(".step-")?;
        let step = rest.strip_suffix(".safetensors")?;
        let file = FileName::new(attempt.parse().ok()?, step.parse().ok()?);
        (file.name == name).then_some(file)
    }
}

fn encode(state: &State, attempt: u64) -> Vec<u8> {
    let mut metadata = state.settings.clone();
    metadata.insert("step".to_owned(), state.step.to_string());
    metadata.insert("attempt".to_owned(), attempt.to_string());
    let bytes: BTreeMap<&str, (&[usize], Vec<u8>)> = state
        .arrays
        .iter()
        .map(|(name, array)| {
            (
                name.as_str(),
                (array.shape.as_slice(), array.values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            )
        })
        .collect();
    let hash = content_hash(&metadata, bytes.iter().map(|(name, (shape, data))| (*name, *shape, data.as_slice())));
    metadata.insert("sha256".to_owned(), hash);
    let views = bytes.iter().map(|(name, (shape, data))| {
        let view =
            TensorView::new(Dtype::F32, shape.to_vec(), data).expect("an array has as many values as its shape says");
        (*name, view)
    });
    let metadata: HashMap<String, String> = metadata.into_iter().collect();
    safetensors::serialize(views, Some(metadata)).expect("names and shapes are plain")
}

/// The state in a file, or the defect of the file.
fn decode(content: &[u8]) -> Result<State, String> {
    let parsed = SafeTensors::deserialize(content).map_err(|error| format!("not a whole safetensors file: {error}"))?;
    let (_, header) = SafeTensors::read_metadata(content).map_err(|error| error.to_string())?;
    let mut metadata: BTreeMap<String, String> = header.metadata().clone().unwrap_or_default().into_iter().collect();
    let stored = metadata.remove("sha256").ok_or("it carries no sha256")?;
    let views: BTreeMap<String, TensorView> = parsed.tensors().into_iter().collect();
    let hash = content_hash(&metadata, views.iter().map(|(name, view)| (name.as_str(), view.shape(), view.data())));
    if hash != stored {
        return Err("its sha256 does not match its content".to_owned());
    }
    let step = metadata.remove("step").and_then(|step| step.parse().ok()).ok_or("it carries no step")?;
    metadata.remove("attempt");
    let mut arrays = BTreeMap::new();
    for (name, view) in views {
        if view.dtype() != Dtype::F32 {
            return Err(format!("{name} is not f32"));
        }
        let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        arrays.insert(name, Array { shape: view.shape().to_vec(), values });
    }
    Ok(State { step, settings: metadata, arrays })
}

/// SHA-256 of metadata and arrays in the order of their names. Lengths are hashed too, so that different contents are
/// different inputs of the hash.
fn content_hash<'a>(
    metadata: &BTreeMap<String, String>,
    arrays: impl Iterator<Item = (&'a str, &'a [usize], &'a [u8])>,
) -> String {
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    for (name, value) in metadata {
        add(name.as_bytes());
        add(value.as_bytes());
    }
    for (name, shape, data) in arrays {
        add(name.as_bytes());
        shape.iter().for_each(|&size| add(&(size as u64).to_le_bytes()));
        add(data);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(step: u64) -> State {
        let array = |shape: &[usize], from: f32| Array {
            shape: shape.to_vec(),
            values: (0..shape.iter().product()).map(|i| from + i as f32).collect(),
        };
        let arrays = [("param.a", array(&[2, 3], step as f32)), ("param.b", array(&[4], -1.5))];
        State {
            step,
            settings: [("model".to_owned(), "vae".to_owned())].into(),
            arrays: arrays.map(|(name, array)| (name.to_owned(), array)).into(),
        }
    }

    fn newest(store: &mut Store) -> (Option<u64>, usize) {
        let mut skipped = 0;
        let newest = store.load_newest(|_| skipped += 1).unwrap();
        (newest.map(|(_, state)| state.step), skipped)
    }

    #[test]
    fn saved_state_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::claim(&dir.path().join("deep/er"), 3).unwrap();
        assert_eq!(newest(&mut store), (None, 0));
        let path = store.save(&state(7)).unwrap();
        let (found, loaded) = store.load_newest(|_| panic!("nothing is damaged")).unwrap().unwrap();
        assert_eq!((found, loaded), (path, state(7)));
    }

    #[test]
    fn damaged_files_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::claim(dir.path(), 0).unwrap();
        store.save(&state(1)).unwrap();
        let path = store.save(&state(2)).unwrap();
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(newest(&mut store), (Some(1), 1), "cut to {length} of {} bytes", whole.len());
        }
        // The hash detects every flipped bit that changes the content. Blanks may be padding of the header.
        for index in (0..whole.len()).filter(|&index| whole[index] != b' ') {
            let mut flipped = whole.clone();
            flipped[index] ^= 1;
            fs::write(&path, &flipped).unwrap();
            assert_eq!(newest(&mut store), (Some(1), 1), "bit flipped in byte {index}");
        }
        fs::write(&path, &whole).unwrap();
        assert_eq!(newest(&mut store), (Some(2), 0));
    }

    #[test]
    fn previous_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::claim(dir.path(), 0).unwrap();
        fs::write(dir.path().join("attempt-0.step-x.safetensors"), "a user's own file").unwrap();
        for step in 1..=4 {
            store.save(&state(step)).unwrap();
        }
        let steps = |store: &Store| store.list_files().unwrap().iter().map(|file| file.step).collect::<Vec<_>>();
        assert_eq!(steps(&store), [4, 3]);

        // The newest file is torn. The run continues from the one before, which the next save must keep.
        fs::write(dir.path().join("attempt-0.step-4.safetensors"), "torn").unwrap();
        let mut store = Store::claim(dir.path(), 0).unwrap();
        assert_eq!(newest(&mut store), (Some(3), 1));
        store.save(&state(5)).unwrap();
        assert_eq!(steps(&store), [5, 3]);
        assert!(dir.path().join("attempt-0.step-x.safetensors").exists());
    }

    #[test]
    fn older_attempt_is_fenced() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = Store::claim(dir.path(), 1).unwrap();
        first.save(&state(10)).unwrap();
        let mut second = Store::claim(dir.path(), 2).unwrap();
        let error = first.save(&state(20)).unwrap_err();
        assert!(error.is_fenced() && error.to_string().contains("attempt 2"), "{error}");
        second.save(&state(5)).unwrap();
        assert_eq!(newest(&mut second).0, Some(5), "the later attempt counts, even with fewer steps");
        assert!(Store::claim(dir.path(), 1).unwrap_err().is_fenced());

        // The files fence as well, in case the fence was removed.
        fs::remove_file(dir.path().join(FENCE)).unwrap();
        assert!(Store::claim(dir.path(), 1).unwrap_err().is_fenced());

        // Of two runs of one attempt, the later one owns the directory.
        let mut third = Store::claim(dir.path(), 2).unwrap();
        assert!(second.save(&state(30)).unwrap_err().is_fenced());
        third.save(&state(31)).unwrap();
    }

    #[test]
    fn failed_save_keeps_the_previous() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::claim(dir.path(), 0).unwrap();
        store.save(&state(1)).unwrap();
        // A directory with the name of the temporary file makes every write fail, also for root.
        fs::create_dir(dir.path().join(TEMPORARY)).unwrap();
        let error = store.save(&state(2)).unwrap_err().to_string();
        assert!(error.contains("attempt-0.step-2") && !error.contains('\n'), "{error}");
        assert_eq!(newest(&mut store), (Some(1), 0));
        fs::remove_dir(dir.path().join(TEMPORARY)).unwrap();
        store.save(&state(3)).unwrap();
        assert_eq!(newest(&mut store), (Some(3), 0));
    }
}
