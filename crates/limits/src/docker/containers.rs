//! Containers that Gainshare starts: the jobs of a job file that run under Docker.
//!
//! A container is made from a [`ContainerSpec`], started, and afterwards treated like any adopted one. It
//! never restarts by itself (the daemon counts attempts) and stays until [`Engine::remove`], so that its exit
//! code and its output can be read at any later time. Images are never pulled unless the spec allows it: a
//! job must not begin with an unexpected download.

use super::engine::{Engine, failed, is_missing, parse_time_ns, short};
use super::labels;
use crate::RuntimeError;
use bollard::errors::Error;
use bollard::models::{ContainerCreateBody, HostConfig, Mount, MountType};
use bollard::query_parameters::{
    CreateContainerOptions, CreateImageOptions, RemoveContainerOptions, StopContainerOptions,
};
use futures_util::StreamExt;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

/// A directory of this machine shown to a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    pub host: PathBuf,
    pub container: PathBuf,
    pub read_only: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Network {
    /// The engine's default network.
    #[default]
    Default,
    /// No network but the loopback.
    None,
}

/// A container to be made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerSpec {
    pub name: String,
    pub image: String,
    /// Replaces the image's command; empty keeps it. The image's entry point is kept unless `clear_entrypoint`.
    pub command: Vec<String>,
    /// Runs `command` itself and not as arguments of the image's entry point.
    pub clear_entrypoint: bool,
    pub env: BTreeMap<String, String>,
    pub workdir: Option<PathBuf>,
    pub binds: Vec<Bind>,
    /// In addition to `gainshare.enable=true`.
    pub labels: BTreeMap<String, String>,
    /// `uid`, `uid:gid` or names the image knows; `None` keeps the image's user.
    pub user: Option<String>,
    pub network: Network,
    /// Puts a small init process before the command, which forwards signals and reaps orphans: a shell as
    /// first process ignores SIGTERM, and the job could then only be killed.
    pub init: bool,
    /// Fetch the image if it is missing.
    pub pull: bool,
}

/// Pulling and stopping may take long; this only bounds the wait for an engine that hangs.
const LONG_TIMEOUT: Duration = Duration::from_secs(3600);

impl Engine {
    /// Makes and starts a container and returns its full id. If it cannot be started, nothing is left behind.
    pub fn create_and_start(&self, spec: &ContainerSpec) -> Result<String, RuntimeError> {
        self.wait(async {
            let id = match self.create(spec).await {
                Err(error) if is_missing(&error) && spec.pull => {
                    self.pull(&spec.image).await?;
                    self.create(spec).await
                }
                result => result,
            };
            let id = id.map_err(|error| self.not_created(spec, error))?;
            if let Err(error) = self.docker.start_container(&id, None).await {
                self.remove_now(&id).await?;
                return Err(failed(&self.socket, &format!("start container {}", spec.name), error));
            }
            Ok(id)
        })
    }

    async fn create(&self, spec: &ContainerSpec) -> Result<String, Error> {
        let mut all_labels: HashMap<String, String> = spec.labels.clone().into_iter().collect();
        all_labels.insert(labels::ENABLE.to_owned(), "true".to_owned());
        // A mount and not a bind, because for a bind whose directory is missing the engine makes one, as root.
        let mount = |bind: &Bind| Mount {
            typ: Some(MountType::BIND),
            source: Some(bind.host.display().to_string()),
            target: Some(bind.container.display().to_string()),
            read_only: Some(bind.read_only),
            ..Default::default()
        };
        let body = ContainerCreateBody {
            image: Some(spec.image.clone()),
            cmd: (!spec.command.is_empty()).then(|| spec.command.clone()),
            entrypoint: spec.clear_entrypoint.then(|| vec![String::new()]),
            env: Some(spec.env.iter().map(|(name, value)| format!("{name}={value}")).collect()),
            working_dir: spec.workdir.as_ref().map(|dir| dir.display().to_string()),
            labels: Some(all_labels),
            user: spec.user.clone(),
            host_config: Some(HostConfig {
                mounts: Some(spec.binds.iter().map(mount).collect()),
                init: Some(spec.init),
                network_mode: (spec.network == Network::None).then(|| "none".to_owned()),
                ..Default::default()
            }),
            ..Default::default()
        };
        let options = CreateContainerOptions { name: Some(spec.name.clone()), ..Default::default() };
        Ok(self.docker.create_container(Some(options), body).await?.id)
    }

    fn not_created(&self, spec: &ContainerSpec, error: Error) -> RuntimeError {
        let (what, remedy) = match &error {
            Error::DockerResponseServerError { status_code: 404, .. } => (
                format!("image {0} is not on this machine (docker pull {0})", spec.image),
                "Pull it, or name an image that `docker images` lists",
            ),
            Error::DockerResponseServerError { status_code: 409, .. } => (
                format!("a container named {} exists already", spec.name),
                "Remove it with `docker rm`, or give the job another name",
            ),
            _ => return failed(&self.socket, &format!("create container {}", spec.name), error),
        };
        RuntimeError::Docker { what, remedy }
    }

    async fn pull(&self, image: &str) -> Result<(), RuntimeError> {
        // Without a tag the engine would fetch every tag there is.
        let name = image.rsplit('/').next().unwrap_or(image);
        let tag = if name.contains([':', '@']) { None } else { Some("latest".to_owned()) };
        let options = CreateImageOptions { from_image: Some(image.to_owned()), tag, ..Default::default() };
        let docker = self.docker.clone().with_timeout(LONG_TIMEOUT);
        let mut progress = std::pin::pin!(docker.create_image(Some(options), None, None));
        while let Some(step) = progress.next().await {
            step.map_err(|error| failed(&self.socket, &format!("pull image {image}"), error))?;
        }
        Ok(())
    }

    /// Sends SIGTERM to a container and kills it when `grace` has passed. Returns at once; the event stream
    /// reports its end.
    pub fn stop(&self, id: &str, grace: Duration) -> Result<(), RuntimeError> {
        // Inspected first, so that a container that is gone or an engine that is down is an error here and
        // not only in the log.
        self.wait(self.inspect(id))?;
        let seconds = grace.as_secs().saturating_add(u64::from(grace.subsec_nanos() > 0));
        let options = StopContainerOptions { t: i32::try_from(seconds).ok(), ..Default::default() };
        let docker = self.docker.clone().with_timeout(grace.saturating_add(LONG_TIMEOUT));
        let id = id.to_owned();
        self.spawn(async move {
            if let Err(error) = docker.stop_container(&id, Some(options)).await {
                tracing::warn!(container = short(&id), %error, "the container could not be stopped");
            }
        });
        Ok(())
    }

    /// The exit code of a container that has ended, `None` while it runs. Waits for the engine.
    pub fn exit_code(&self, id: &str) -> Result<Option<i64>, RuntimeError> {
        self.wait(self.read_exit_code(id))
    }

    /// When a container ended, in seconds since 1970 of the engine's clock; `None` while it runs. Waits for the engine.
    pub fn ended_s(&self, id: &str) -> Result<Option<f64>, RuntimeError> {
        let state = self.wait(self.inspect(id))?.state.unwrap_or_default();
        let is_over = state.running != Some(true) && state.restarting != Some(true);
        let ended_ns = state.finished_at.as_deref().filter(|_| is_over).and_then(parse_time_ns);
        Ok(ended_ns.filter(|ns| *ns > 0).map(|ns| ns as f64 / 1e9))
    }

    /// The same without waiting: returns at once, and `reply` is called with the answer on the background thread.
    pub fn request_exit_code(&self, id: &str, reply: impl FnOnce(Result<Option<i64>, RuntimeError>) + Send + 'static) {
        let (engine, id) = (self.clone(), id.to_owned());
        self.spawn(async move { reply(engine.read_exit_code(&id).await) });
    }

    async fn read_exit_code(&self, id: &str) -> Result<Option<i64>, RuntimeError> {
        let state = self.inspect(id).await?.state.unwrap_or_default();
        let is_over = state.running != Some(true) && state.restarting != Some(true);
        Ok(if is_over { state.exit_code } else { None })
    }

    /// Removes a container, its output and its anonymous volumes; kills it if it still runs. Does nothing if
    /// it is gone.
    pub fn remove(&self, id: &str) -> Result<(), RuntimeError> {
        self.wait(self.remove_now(id))
    }

    async fn remove_now(&self, id: &str) -> Result<(), RuntimeError> {
        let options = RemoveContainerOptions { v: true, force: true, link: false };
        match self.docker.remove_container(id, Some(options)).await {
            Err(error) if !is_missing(&error) => {
                Err(failed(&self.socket, &format!("remove container {}", short(id)), error))
            }
            _ => Ok(()),
        }
    }
}
