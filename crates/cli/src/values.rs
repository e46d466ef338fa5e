//! Values that several commands accept on the command line, with the list of choices for help and completion.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use gainshare_core::policy::{Aim, Preset};

/// The policies that may decide on real jobs. Those that may not are recognised, and refused with the reason.
pub fn policy_for_real_jobs() -> impl TypedValueParser<Value = Preset> {
    let value = |preset: Preset| {
        let shown = preset.for_real_jobs().is_ok();
        PossibleValue::new(preset.name()).help(preset.info().summary).hide(!shown)
    };
    let refuse = |name: String| name.parse::<Preset>().and_then(Preset::for_real_jobs);
    PossibleValuesParser::new(Preset::ALL.map(value)).try_map(refuse)
}

/// All policies.
pub fn policy() -> impl TypedValueParser<Value = Preset> {
    let value = |preset: Preset| PossibleValue::new(preset.name()).help(preset.info().summary);
    PossibleValuesParser::new(Preset::ALL.map(value)).try_map(|name| name.parse::<Preset>())
}

/// What policies that share by gain make as early as possible.
pub fn aim() -> impl TypedValueParser<Value = Aim> {
    let value = |aim: Aim| PossibleValue::new(aim.name()).help(aim.summary());
    PossibleValuesParser::new(Aim::ALL.map(value)).try_map(|name| name.parse::<Aim>())
}
