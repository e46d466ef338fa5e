//! Code that reads and writes the objects of a cluster, compiled once.
//!
//! **Problem.** The code that reads a pod is generic over the source, and there is more of it than of anything else in
//! this workspace. Each crate, program and test that reads pods would compile it again.
//!
//! **How.** At the optimisation levels of this workspace for this crate and those above it (`s` and `z`), a crate links
//! the generic code that a crate below it has compiled. [`compile`] names that code for the objects that several crates
//! read. Nothing calls it, and programs do not contain it.

use crate::share_policy::SharePolicy;
use crate::tfjob::TfJob;
use crate::training_job::TrainingJob;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{LimitRange, Node, Pod, PodSpec, PodTemplateSpec, ResourceQuota, Service};
use kube::core::{ObjectList, WatchEvent};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::hint::black_box;

/// Has no effect but that the code is compiled in this crate.
pub fn compile() {
    compile_object::<Pod>();
    compile_object::<Job>();
    compile_object::<Node>();
    compile_object::<Service>();
    compile_object::<ResourceQuota>();
    compile_object::<LimitRange>();
    compile_object::<TrainingJob>();
    compile_object::<SharePolicy>();
    compile_object::<TfJob>();
    compile_part::<PodTemplateSpec>();
    compile_part::<PodSpec>();
}

/// An object that the client of the API server reads and writes, alone, in lists and in watches.
fn compile_object<T: DeserializeOwned + Serialize + Clone + 'static>() {
    compile_part::<T>();
    black_box(serde_json::from_str::<ObjectList<T>> as fn(&'static str) -> _);
    black_box(serde_json::from_str::<WatchEvent<T>> as fn(&'static str) -> _);
}

fn compile_part<T: DeserializeOwned + Serialize + 'static>() {
    black_box(serde_json::from_str::<T> as fn(&'static str) -> _);
    black_box(serde_json::from_slice::<T> as fn(&'static [u8]) -> _);
    black_box(serde_json::from_value::<T> as fn(Value) -> _);
    black_box(serde_json::to_value::<&'static T> as fn(_) -> _);
    black_box(serde_json::to_vec::<T> as fn(&'static T) -> _);
}
