//! `gainshare crd`: prints the custom resource definitions.

use crate::print::Out;
use anyhow::Result;
use gainshare_kube::crd::SharePolicy;
use gainshare_kube::kube::CustomResourceExt;

pub fn crd(out: &Out) -> Result<u8> {
    let definition = SharePolicy::crd();
    if out.is_json() {
        out.text(&format!("{}\n", serde_json::to_string_pretty(&definition)?))?;
    } else {
        out.text(&serde_saphyr::to_string(&definition)?)?;
    }
    Ok(0)
}
