//! Makes a journal of an older version one of this version.
//!
//! Version 1 kept the environments of jobs in the `jobs` table and in the `submitted` rows. Version
//! 2 keeps only the names of variables; the values are in the job's `spec.json` until the job has
//! started.

use super::{Change, JobRecord, JournalError, SCHEMA_VERSION, explain, json};
use crate::jobdir;
use crate::types::{JobState, SuperviseFile};
use rusqlite::{Connection, Transaction, params};
use std::collections::BTreeMap;
use std::path::Path;

/// `jobs_dir` is the directory of all JOBDIRs. The values leave the database only after they are in their files.
pub(super) fn migrate(db: &mut Connection, path: &str, found: i64, jobs_dir: &Path) -> Result<(), JournalError> {
    if found >= SCHEMA_VERSION {
        return Ok(());
    }
    tracing::info!("the journal {path} is of version {found}: making it one of version {SCHEMA_VERSION}");
    move_environments(db, path, jobs_dir)?;
    let fail = |e| explain(path, e);
    let tx = db.transaction().map_err(fail)?;
    drop_environments(&tx).and_then(|()| tx.commit()).map_err(fail)?;
    // What was deleted would stay readable in free pages and in the write-ahead log.
    db.execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE);").map_err(fail)
}

fn move_environments(db: &Connection, path: &str, jobs_dir: &Path) -> Result<(), JournalError> {
    let fail = |e| explain(path, e);
    let mut query = db.prepare("SELECT record, base_env FROM jobs").map_err(fail)?;
    let rows = query.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, String>(1)?))).map_err(fail)?;
    for row in rows {
        let (record, base_env) = row.map_err(fail)?;
        let damaged = |e: serde_json::Error| JournalError::Damaged { path: path.to_owned(), what: e.to_string() };
        let record: JobRecord = serde_json::from_str(&record).map_err(damaged)?;
        let base_env: BTreeMap<String, String> = serde_json::from_str(&base_env).map_err(damaged)?;
        if record.attached || !matches!(record.state, JobState::Queued | JobState::Starting) {
            continue;
        }
        let file = SuperviseFile {
            id: record.id.0,
            name: record.name.clone(),
            spec: record.spec.clone(),
            base_env,
            order: record.order.clone().unwrap_or_default(),
            socket: String::new(),
        };
        let dir = jobs_dir.join(record.id.0.to_string());
        jobdir::write_json(&dir, jobdir::SPEC, &file)
            .map_err(|e| JournalError::Damaged { path: dir.display().to_string(), what: e.to_string() })?;
    }
    Ok(())
}

fn drop_environments(tx: &Transaction) -> rusqlite::Result<()> {
    for (table, key, text) in [("jobs", "id", "record"), ("journal", "seq", "body")] {
        let mut query = tx.prepare(&format!("SELECT {key}, {text} FROM {table}"))?;
        let rows: Vec<(i64, String)> =
            query.query_map([], |r| Ok((r.get(0)?, r.get(1)?)))?.collect::<rusqlite::Result<_>>()?;
        for (id, old) in rows {
            let new = if table == "jobs" { without_values(&old) } else { without_values_in_change(&old) };
            if let Some(new) = new.filter(|new| *new != old) {
                tx.execute(&format!("UPDATE {table} SET {text} = ?2 WHERE {key} = ?1"), params![id, new])?;
            }
        }
    }
    tx.execute_batch("ALTER TABLE jobs DROP COLUMN base_env")?;
    tx.pragma_update(None, "user_version", SCHEMA_VERSION)
}

fn without_values(record: &str) -> Option<String> {
    let mut record: JobRecord = serde_json::from_str(record).ok()?;
    record.spec.hide_env_values();
    Some(json(&record))
}

fn without_values_in_change(change: &str) -> Option<String> {
    match serde_json::from_str(change).ok()? {
        Change::Submitted { mut record } => {
            record.spec.hide_env_values();
            Some(json(&Change::Submitted { record }))
        }
        _ => None,
    }
}
