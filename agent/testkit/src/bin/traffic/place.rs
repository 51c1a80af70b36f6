//! Where the process runs and as whom.

use std::fs;

use crate::options::Options;
use crate::sys;

/// Moves to the cgroup, the network namespace, the group and the user asked for.
pub fn apply(o: &Options) -> Result<(), String> {
    if let Some(dir) = o.text("cgroup") {
        fs::write(format!("{dir}/cgroup.procs"), "0")
            .map_err(|e| format!("cannot enter cgroup {dir}: {e}"))?;
    }
    if let Some(path) = o.text("netns") {
        let file = fs::File::open(path).map_err(|e| format!("cannot open network namespace {path}: {e}"))?;
        sys::enter_netns(&file).map_err(|e| format!("cannot enter network namespace {path}: {e}"))?;
    }
    let uid = o.number("uid")?;
    // `first-packet` becomes the user in each child, because it goes on making cgroups itself.
    if o.word(0) == Ok("first-packet") {
        return Ok(());
    }
    if let Some(gid) = o.number("gid")?.or(uid) {
        sys::set_gid(gid).map_err(|e| format!("cannot become group {gid}: {e}"))?;
    }
    if let Some(uid) = uid {
        // A marking or TPROXY proxy needs CAP_NET_ADMIN under whatever UID.
        let keep = o.flag("keep-caps") || o.flag("tproxy") || o.flag("mark");
        sys::set_uid(uid, keep).map_err(|e| format!("cannot become user {uid}: {e}"))?;
    }
    Ok(())
}
