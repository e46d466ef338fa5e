//! `gainshare crd`: prints the custom resource definitions.

use crate::print::Out;
use anyhow::Result;
use gainshare_kube::crd::SharePolicy;
use gainshare_kube::kube::CustomResourceExt;
use gainshare_kube::training_job::TrainingJob;

pub fn crd(out: &Out) -> Result<u8> {
    let definitions = [SharePolicy::crd(), TrainingJob::crd()];
    if out.is_json() {
        out.text(&format!("{}\n", serde_json::to_string_pretty(&definitions)?))?;
        return Ok(0);
    }
    for definition in &definitions {
        out.text(&format!("---\n{}", serde_saphyr::to_string(definition)?))?;
    }
    Ok(0)
}
