//! Environment variables as a source of flags: what clap does not do for them.

use std::env::{args_os, var_os};

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command, Error};

/// Makes a variable that is set but empty count as unset: charts and units set variables that way.
pub fn without_empty(command: Command) -> Command {
    let command = command.mut_args(|arg| {
        let empty = arg.get_env().and_then(var_os).is_some_and(|value| value.is_empty());
        if empty { arg.env(Resettable::Reset) } else { arg }
    });
    command.mut_subcommands(without_empty)
}

/// The variable whose value `error` is about, if it is not a flag's.
pub fn at_fault(mut command: Command, error: &Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let (shown, value) = (text(ContextKind::InvalidArg)?, text(ContextKind::InvalidValue)?);
    // Only then does a flag know how it is shown.
    command.build();
    let mut args = command.get_subcommands().flat_map(Command::get_arguments);
    let arg = args.find(|arg| arg.to_string() == shown && !is_given(arg))?;
    let name = arg.get_env()?;
    (var_os(name)?.to_string_lossy() == value).then(|| name.to_string_lossy().into_owned())
}

/// Whether the process's arguments have this flag.
fn is_given(arg: &Arg) -> bool {
    let Some(long) = arg.get_long().map(|long| format!("--{long}")) else { return true };
    args_os().any(|given| {
        let given = given.to_string_lossy();
        given.strip_prefix(&long).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    })
}
