//! Checkpoints that survive a kill at any moment.
//!
//! A checkpoint is one safetensors file, `attempt-A.step-S.safetensors`. It is written under a temporary name, synced,
//! renamed, and the directory synced, so that a name either has its whole file or does not exist. A SHA-256 over all
//! content is kept in the file's own metadata, so that damage done later is noticed too; loading takes the newest file whose
//! hash is right and reports the ones it skipped. The previous checkpoint stays until the next one is safe.
//!
//! **Fencing.** At most one run may write into a directory. Each run claims the directory when it starts, by writing its
//! attempt number and a name of its own into `fence.json`. A run of an older attempt cannot claim, and a run whose claim was
//! taken over by a newer (or equal, later) one can no longer save. Claims and saves hold the lock file, so that no save
//! slips in between somebody else's check and write.
//!
//! Properties, each a test: `saved_state_comes_back`, `damaged_files_are_skipped`, `previous_is_kept`,
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
/// A save takes milliseconds; whoever holds the lock longer is stopped or hangs.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// A named block of numbers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Array {
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// Everything a run continues from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct State {
    pub(crate) step: u64,
    /// What the run was set up with, by name.
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
        "{} was taken over by another run of attempt {attempt}; stop one of the two or give each its own --checkpoint directory",
        dir.display()
    )]
    TakenOver { dir: PathBuf, attempt: u64 },
    #[error("{} is locked by another process; see who with `fuser {}`", path.display(), path.display())]
    Locked { path: PathBuf },
}

impl CheckpointError {
    /// Whether another run owns the directory now; going on would be work for nothing.
    pub(crate) fn is_fenced(&self) -> bool {
        matches!(self, CheckpointError::OlderAttempt { .. } | CheckpointError::TakenOver { .. })
    }
}

/// Turns an I/O error into one that names the path and what to do about it.
fn failed<'a>(doing: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> CheckpointError + 'a {
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

/// Who may write.
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
    /// The newest file known to be good, which outlives the next save.
    good: Option<PathBuf>,
}

impl Store {
    /// Makes the directory if needed and claims it for this run.
    pub(crate) fn claim(dir: &Path, attempt: u64) -> Result<Self, CheckpointError> {
        fs::create_dir_all(dir).map_err(failed("create", dir))?;
        let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let owner = format!("{}-{}", std::process::id(), moment.as_nanos());
        let store = Store { dir: dir.to_owned(), fence: Fence { attempt, owner }, good: None };
        let _lock = store.lock()?;
        // The files count as well: the fence may have been removed by hand.
        let by_files = store.files()?.iter().map(|file| file.attempt).max();
        let theirs = store.read_fence()?.map(|fence| fence.attempt).max(by_files).unwrap_or(0);
        if attempt < theirs {
            return Err(CheckpointError::OlderAttempt { dir: dir.to_owned(), mine: attempt, theirs });
        }
        let content = serde_json::to_vec(&store.fence).expect("two plain fields are always JSON");
        store.write_synced(FENCE, &content)?;
        Ok(store)
    }

    /// Loads the newest whole checkpoint; `skipped` hears of every newer one that is damaged.
    pub(crate) fn load_newest(
        &mut self,
        mut skipped: impl FnMut(CheckpointError),
    ) -> Result<Option<(PathBuf, State)>, CheckpointError> {
        for file in self.files()? {
            let path = self.dir.join(&file.name);
            let content = fs::read(&path).map_err(failed("read", &path))?;
            match decode(&content) {
                Ok(state) => {
                    self.good = Some(path.clone());
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
        let previous = self.good.replace(path.clone());
        self.prune(&[Some(&path), previous.as_ref()]);
        Ok(path)
    }

    /// Removes old checkpoints and left-over temporary files. What cannot be removed now is removed after the next save.
    fn prune(&self, keep: &[Option<&PathBuf>]) {
        let old = self.files().unwrap_or_default();
        for path in old.iter().map(|file| self.dir.join(&file.name)) {
            if !keep.contains(&Some(&path)) {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Checkpoints in the directory by name, newest first: a later attempt before an earlier, then by step.
    fn files(&self) -> Result<Vec<FileName>, CheckpointError> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(failed("list", &self.dir))? {
            let name = entry.map_err(failed("list", &self.dir))?.file_name();
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
            Err(error) => Err(failed("read", &path)(error)),
        }
    }

    /// Taken for claims and saves only; the kernel releases it when the process ends, however it ends.
    fn lock(&self) -> Result<File, CheckpointError> {
        let path = self.dir.join(LOCK);
        let file = File::options().create(true).append(true).open(&path).map_err(failed("open", &path))?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if started.elapsed() < LOCK_PATIENCE => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => return Err(CheckpointError::Locked { path }),
                Err(TryLockError::Error(error)) => return Err(failed("lock", &path)(error)),
            }
        }
    }

    /// Temporary name, sync, rename, sync of the directory. Callers hold the lock, so one temporary name is enough, and a
    /// file that a killed save left behind is overwritten by the next.
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
            // The half-written file would only take up the space that is missing.
            let _ = fs::remove_file(&temporary);
            failed("save", &path)(error)
        })?;
        Ok(path)
    }
}

/// A checkpoint's file name, taken apart.
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

    /// Accepts only names we would give, so that pruning can never touch a user's file.
    fn parse(name: &str) -> Option<Self> {
        let (attempt, rest) = name.strip_prefix("attempt-")?.split_once(".step-")?;
        let step = rest.strip_suffix(".safetensors")?;
        let file = FileName::new(attempt.parse().ok()?, step.parse().ok()?);
        (file.name == name).then_some(file)
    }
}

fn encode(state: &State, attempt: u64) -> Vec<u8> {
    let mut settings = state.settings.clone();
    settings.insert("step".to_owned(), state.step.to_string());
    settings.insert("attempt".to_owned(), attempt.to_string());
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
    let hash = content_hash(&settings, bytes.iter().map(|(name, (shape, data))| (*name, *shape, data.as_slice())));
    settings.insert("sha256".to_owned(), hash);
    let views = bytes.iter().map(|(name, (shape, data))| {
        let view =
            TensorView::new(Dtype::F32, shape.to_vec(), data).expect("an array has as many values as its shape says");
        (*name, view)
    });
    let settings: HashMap<String, String> = settings.into_iter().collect();
    safetensors::serialize(views, Some(settings)).expect("names and shapes are plain")
}

/// The state in a file, or what is wrong with the file.
fn decode(content: &[u8]) -> Result<State, String> {
    let parsed = SafeTensors::deserialize(content).map_err(|error| format!("not a whole safetensors file: {error}"))?;
    let (_, header) = SafeTensors::read_metadata(content).map_err(|error| error.to_string())?;
    let mut settings: BTreeMap<String, String> = header.metadata().clone().unwrap_or_default().into_iter().collect();
    let stored = settings.remove("sha256").ok_or("it carries no sha256")?;
    let views: BTreeMap<String, TensorView> = parsed.tensors().into_iter().collect();
    let hash = content_hash(&settings, views.iter().map(|(name, view)| (name.as_str(), view.shape(), view.data())));
    if hash != stored {
        return Err("its sha256 does not match its content".to_owned());
    }
    let step = settings.remove("step").and_then(|step| step.parse().ok()).ok_or("it carries no step")?;
    settings.remove("attempt");
    let mut arrays = BTreeMap::new();
    for (name, view) in views {
        if view.dtype() != Dtype::F32 {
            return Err(format!("{name} is not f32"));
        }
        let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        arrays.insert(name, Array { shape: view.shape().to_vec(), values });
    }
    Ok(State { step, settings, arrays })
}

/// Hash of settings and arrays in the order of their names; lengths are hashed too, so that no two contents read alike.
fn content_hash<'a>(
    settings: &BTreeMap<String, String>,
    arrays: impl Iterator<Item = (&'a str, &'a [usize], &'a [u8])>,
) -> String {
    let mut hash = Sha256::new();
    let mut add = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    for (name, value) in settings {
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
        let found = store.load_newest(|_| skipped += 1).unwrap();
        (found.map(|(_, state)| state.step), skipped)
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
        // A flipped bit is found by the hash wherever it changes the meaning; the header may be padded with blanks.
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
        let steps = |store: &Store| store.files().unwrap().iter().map(|file| file.step).collect::<Vec<_>>();
        assert_eq!(steps(&store), [4, 3]);

        // The newest is torn: the run goes on from the one before, which must survive the next save.
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

        // The files fence too, should the fence have been removed.
        fs::remove_file(dir.path().join(FENCE)).unwrap();
        assert!(Store::claim(dir.path(), 1).unwrap_err().is_fenced());

        // Two runs of one attempt: the later owns the directory.
        let mut third = Store::claim(dir.path(), 2).unwrap();
        assert!(second.save(&state(30)).unwrap_err().is_fenced());
        third.save(&state(31)).unwrap();
    }

    #[test]
    fn failed_save_keeps_the_previous() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::claim(dir.path(), 0).unwrap();
        store.save(&state(1)).unwrap();
        // A directory in the way of the temporary file makes every write fail, for the superuser as well.
        fs::create_dir(dir.path().join(TEMPORARY)).unwrap();
        let error = store.save(&state(2)).unwrap_err().to_string();
        assert!(error.contains("attempt-0.step-2") && !error.contains('\n'), "{error}");
        assert_eq!(newest(&mut store), (Some(1), 0));
        fs::remove_dir(dir.path().join(TEMPORARY)).unwrap();
        store.save(&state(3)).unwrap();
        assert_eq!(newest(&mut store), (Some(3), 0));
    }
}
