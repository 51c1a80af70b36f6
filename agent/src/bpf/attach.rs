//! Single steps of attaching: load a program, attach it, pin its link, and find out why not.

use std::fs;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;

use aya::Ebpf;
use aya::programs::links::FdLink;
use aya::programs::trace_point::TracePointLink;
use aya::programs::{
    CgroupAttachMode, CgroupSkb, CgroupSkbAttachType, CgroupSockAddr, ProgramError, ProgramFd, SockOps,
    TracePoint,
};

use super::error::{BpfError, Chain};
use super::hooks::Hook;
use super::parents::Parent;
use super::pins::PinDir;
use crate::sys::bpf as raw;

/// Loads one program of a fresh object.
///
/// # Errors
/// As the kernel's verifier says.
pub fn load_program(ebpf: &mut Ebpf, hook: Hook) -> Result<(), ProgramError> {
    match hook {
        Hook::Egress | Hook::Ingress => program::<CgroupSkb>(ebpf, hook)?.load(),
        Hook::Connect4 | Hook::Connect6 => program::<CgroupSockAddr>(ebpf, hook)?.load(),
        Hook::SockOps => program::<SockOps>(ebpf, hook)?.load(),
        Hook::Mkdir | Hook::Rmdir => program::<TracePoint>(ebpf, hook)?.load(),
    }
}

fn program<'a, T>(ebpf: &'a mut Ebpf, hook: Hook) -> Result<&'a mut T, ProgramError>
where
    &'a mut T: TryFrom<&'a mut aya::programs::Program, Error = ProgramError>,
{
    ebpf.program_mut(hook.program()).ok_or(ProgramError::NotLoaded)?.try_into()
}

/// Attaches one cgroup program by a link of its own.
///
/// # Errors
/// As bpf(2) says.
pub fn attach_program(ebpf: &mut Ebpf, hook: Hook, cgroup: &File) -> Result<FdLink, ProgramError> {
    // Links are always "multi" and the kernel takes no flags: `Single` passes none.
    let mode = CgroupAttachMode::Single;
    match hook {
        Hook::Egress | Hook::Ingress => {
            let attach_type =
                if hook == Hook::Egress { CgroupSkbAttachType::Egress } else { CgroupSkbAttachType::Ingress };
            let program = program::<CgroupSkb>(ebpf, hook)?;
            let id = program.attach(cgroup, attach_type, mode)?;
            Ok(program.take_link(id)?.try_into().map_err(|_| ProgramError::NotLoaded)?)
        }
        Hook::SockOps => {
            let program = program::<SockOps>(ebpf, hook)?;
            let id = program.attach(cgroup, mode)?;
            Ok(program.take_link(id)?.try_into().map_err(|_| ProgramError::NotLoaded)?)
        }
        _ => {
            let program = program::<CgroupSockAddr>(ebpf, hook)?;
            let id = program.attach(cgroup, mode)?;
            Ok(program.take_link(id)?.try_into().map_err(|_| ProgramError::NotLoaded)?)
        }
    }
}

pub fn attach_tracepoint(ebpf: &mut Ebpf, hook: Hook) -> Result<TracePointLink, ProgramError> {
    let program = program::<TracePoint>(ebpf, hook)?;
    let id = program.attach("cgroup", hook.label())?;
    program.take_link(id)
}

pub fn program_fd(ebpf: &mut Ebpf, hook: Hook) -> Result<ProgramFd, BpfError> {
    let fd = ebpf.program(hook.program()).ok_or(ProgramError::NotLoaded).and_then(|program| {
        program.fd().map_err(|_| ProgramError::NotLoaded)?.try_clone().map_err(ProgramError::from)
    });
    fd.map_err(|error| BpfError::load(format!("program {}", hook.program()), error))
}

pub fn pin_link(link: FdLink, pin: &Path) -> Result<(), BpfError> {
    let pinned = link.pin(pin).map_err(|error| BpfError::Pin {
        what: "pin",
        path: pin.into(),
        source: std::io::Error::other(error),
    })?;
    // Closing the descriptor leaves the link to its pin.
    drop(pinned);
    Ok(())
}

/// Our program without our pin: another agent, or a bpffs mounted over ours.
pub fn check_not_stacked(dir: &PinDir, parent: &Parent) -> Result<(), BpfError> {
    let Ok(cgroup) = File::open(&parent.path) else { return Ok(()) };
    for hook in Hook::CGROUP {
        let Some(attach_type) = hook.attach_type() else { continue };
        let Ok(attached) = raw::attached(cgroup.as_fd(), attach_type, false) else { continue };
        let ours = raw::open_pin(&dir.link(hook, Some(parent.cgroup_id)))
            .and_then(|link| raw::cgroup_link(link.as_fd()))
            .ok()
            .flatten()
            .map(|link| link.program_id);
        for program in attached.programs {
            let named_like_ours = raw::program_name(program).is_ok_and(|name| name == hook.program());
            // A link of another ABI is replaced once the new ones work.
            if named_like_ours && Some(program) != ours && !is_pinned_elsewhere(dir, program) {
                return Err(BpfError::Stacked {
                    cgroup: parent.path.clone(),
                    hook: hook.label(),
                    program,
                    dir: dir.base().into(),
                });
            }
        }
    }
    Ok(())
}

/// Whether a program is that of a link in any version's directory below `--bpf-dir`.
fn is_pinned_elsewhere(dir: &PinDir, program: u32) -> bool {
    let versions = fs::read_dir(dir.base()).into_iter().flatten().flatten();
    versions.flat_map(|version| fs::read_dir(version.path()).into_iter().flatten().flatten()).any(|pin| {
        raw::open_pin(&pin.path())
            .and_then(|link| raw::cgroup_link(link.as_fd()))
            .is_ok_and(|link| link.is_some_and(|link| link.program_id == program))
    })
}

/// Programs of others above a parent whose place ours takes: with `BPF_F_ALLOW_OVERRIDE` a program runs only where none is
/// attached below (`compute_effective_progs`, <https://github.com/torvalds/linux/blob/v6.12/kernel/bpf/cgroup.c#L406>).
pub fn overridden(parent: &Parent) -> Vec<String> {
    let mut found = Vec::new();
    for hook in Hook::CGROUP {
        let Some(attach_type) = hook.attach_type() else { continue };
        for ancestor in parent.path.ancestors().skip(1) {
            let Ok(cgroup) = File::open(ancestor) else { break };
            let Ok(attached) = raw::attached(cgroup.as_fd(), attach_type, false) else { break };
            if let (Some(program), 1) = (attached.programs.first(), attached.flags) {
                let name = raw::program_name(*program).unwrap_or_default();
                found.push(format!(
                    "program {program} ({name}) on {} ({})",
                    ancestor.display(),
                    hook.label()
                ));
            }
        }
    }
    found
}

/// Why a cgroup refused a program: EPERM mostly means that an ancestor has an exclusive one.
pub fn explain_refusal(
    hook: Hook,
    attach_type: raw::AttachType,
    parent: &Parent,
    source: ProgramError,
) -> BpfError {
    let denied = super::error::is_denied(&source);
    if denied {
        for ancestor in parent.path.ancestors() {
            let Ok(cgroup) = File::open(ancestor) else { break };
            let Ok(attached) = raw::attached(cgroup.as_fd(), attach_type, false) else { break };
            // Flags 0 with a program: exclusive. Links and BPF_F_ALLOW_MULTI report 2, override 1.
            if let (Some(program), 0) = (attached.programs.first(), attached.flags) {
                return BpfError::ForeignExclusive {
                    hook: hook.label(),
                    cgroup: parent.path.clone(),
                    ancestor: ancestor.into(),
                    program: *program,
                    name: raw::program_name(*program).unwrap_or_default(),
                };
            }
        }
    }
    BpfError::Attach {
        hook: hook.label(),
        cgroup: parent.path.clone(),
        source: Box::new(Chain(Box::new(source))),
        remedy: if denied { BpfError::NEEDS_CAPS } else { BpfError::NEEDS_KERNEL }.into(),
    }
}
