//! The steps. Each does one thing, shows what came of it and fails if that is not what it claims.

use std::time::Instant;

use anyhow::{Result, ensure};
use nobypass_testkit::node::{EXT_PORT, EXT4, Pod};

use crate::interrupt::until;
use crate::lab::{LIMIT, Lab, Outcome};
use crate::screen::Screen;

const TITLE: &str = "nobypass demo: one private containerd node on this machine, no cluster";

/// So many dropped attempts show that it was not chance.
const SOME: u64 = 10;

/// Tells it all. `lab` holds whatever has been started, also after an error.
pub fn tell(screen: &mut Screen, lab: &mut Option<Lab>) -> Result<()> {
    screen.title(TITLE)?;
    let server = format!("{EXT4}:{EXT_PORT}");
    screen.plain(&format!(
        "  server       {server}, outside; says whether a connection came through the mesh's proxy"
    ))?;
    screen.plain(
        "  shop/early   application and linkerd-proxy; starts before the mesh's CNI plugin is installed",
    )?;
    screen.plain("  shop/late    the same; starts after it")?;
    screen.plain("  shop/next    the same; starts after the primary CNI has thrown the plugin out again")?;

    screen.step("A node has just joined: pods start, the mesh's CNI plugin is not there yet")?;
    let lab = lab.insert(Lab::new()?);
    let early = lab.meshed_pod("early")?;
    bypass(screen, lab, &early)?;
    screen.ok("the connection went around the proxy, unencrypted, and nobody was told")?;
    screen.pause(&lab.way_in())?;

    audit(screen, lab, &early)?;
    screen.pause(&lab.way_in())?;
    enforce(screen, lab, &early)?;
    screen.pause(&lab.way_in())?;
    without_agent(screen, lab, &early)?;
    screen.pause(&lab.way_in())?;
    late(screen, lab)?;
    screen.pause(&lab.way_in())?;
    rewritten(screen, lab)?;
    screen.pause(&lab.way_in())?;
    clean_up(screen, lab)
}

fn audit(screen: &mut Screen, lab: &mut Lab, early: &Pod) -> Result<()> {
    screen.step("nobypass in audit mode: counts and reports, lets pass")?;
    screen.command("nobypass agent --mode audit")?;
    lab.start_agent("audit")?;
    screen.command("nobypass events -f")?;
    lab.follow_events()?;
    let start = Instant::now();
    bypass(screen, lab, early)?;
    let event = lab.next_event()?;
    screen.quote(&event)?;
    ensure!(event.contains("passed") && event.contains("shop/early"), "that is another event");
    let line = until("the bypass on /metrics", LIMIT, || {
        let lines = lab.metrics(&["nobypass_pod_bypass{", "nobypass_bypass_connections_total{"])?;
        Ok((lines.len() == 2).then_some(lines))
    })?;
    let verdict = until("the bypass in the status", LIMIT, || {
        let pod = lab.status_of("early")?;
        Ok((pod["v4"]["verdict"] == "bypassing").then_some(pod))
    })?;
    let seen = start.elapsed().as_millis();
    screen.command("nobypass status")?;
    screen.quote(&lab.nobypass(&["status"])?)?;
    screen.command("curl -s localhost:9910/metrics | grep bypass")?;
    screen.quote(&line.join("\n"))?;
    ensure!(verdict["bypasses"] == 1 && verdict["dropped"] == 0, "the status counts otherwise: {verdict}");
    screen.ok(&format!("events, status and /metrics told it within {seen} ms of the attempt"))
}

fn enforce(screen: &mut Screen, lab: &mut Lab, early: &Pod) -> Result<()> {
    screen.step("Enforce: bypasses are dropped from the next packet on")?;
    screen.command("nobypass mode enforce")?;
    screen.quote(&lab.nobypass(&["mode", "enforce"])?)?;
    blocked(screen, lab, early, "ECONNABORTED")?;
    let event = lab.next_event()?;
    screen.quote(&event)?;
    ensure!(event.contains("dropped") && event.contains("shop/early"), "that is another event");
    screen.ok("the connection did not leave the pod")
}

fn without_agent(screen: &mut Screen, lab: &mut Lab, early: &Pod) -> Result<()> {
    screen.step("The agent is killed while the application keeps trying")?;
    let (syns, before) = (lab.syns()?, dropped(lab)?);
    let hammer = lab.hammer(early)?;
    until("attempts under way", LIMIT, || Ok((dropped(lab)? > before + SOME).then_some(())))?;
    screen.says("app", &format!("shop/early -> {EXT4}:{EXT_PORT}, again and again"))?;
    let pid = lab.kill_agent()?;
    screen.command(&format!("kill -9 {pid}"))?;
    let killed = dropped(lab)?;
    // Nobody tells the application now.
    blocked(screen, lab, early, "TIMEOUT")?;
    screen.command("nobypass status")?;
    screen.quote(&lab.nobypass(&["status"])?)?;
    let alone = dropped(lab)?;
    ensure!(alone > killed + SOME, "nothing was dropped without an agent: {killed}, then {alone}");
    screen.command("nobypass agent --mode enforce")?;
    lab.start_agent("enforce")?;
    let adopted = lab.agent_said(" attached ")?;
    screen.quote(&adopted)?;
    ensure!(adopted.contains("adopted=true"), "the new agent did not adopt what the old one left");
    let adopted = dropped(lab)?;
    until("attempts under the new agent", LIMIT, || Ok((dropped(lab)? > adopted + SOME).then_some(())))?;
    drop(hammer);
    let (tried, arrived) = (dropped(lab)? - before, lab.syns()? - syns);
    ensure!(arrived == 0, "{arrived} packets reached the server");
    screen.ok(&format!(
        "{tried} attempts ({} with no agent alive): all dropped and counted, 0 packets reached the server",
        alone - killed
    ))
}

fn late(screen: &mut Screen, lab: &mut Lab) -> Result<()> {
    screen.step(
        "The mesh's plugin is installed; a pod that starts now is redirected, and enforce leaves it alone",
    )?;
    lab.install_mesh_plugin()?;
    let late = lab.meshed_pod("late")?;
    let Outcome { app_saw, plain, mesh, .. } = attempt(screen, lab, &late)?;
    ensure!((app_saw.as_str(), plain, mesh) == ("mesh", 0, 1), "that did not go through the proxy");
    let pod = until("the proof in the status", LIMIT, || {
        let pod = lab.status_of("late")?;
        Ok((pod["v4"]["verdict"] == "redirected").then_some(pod))
    })?;
    screen.command("nobypass status")?;
    screen.quote(&lab.nobypass(&["status"])?)?;
    ensure!(pod["mode"] == "enforce" && pod["bypasses"] == 0, "the status counts otherwise: {pod}");
    screen.ok("through the proxy; nothing of it was dropped")
}

fn rewritten(screen: &mut Screen, lab: &mut Lab) -> Result<()> {
    screen.step("The primary CNI starts again and writes its configuration without the mesh's plugin")?;
    let took = lab.primary_rewrites()?;
    screen.command("nobypass cni status")?;
    let dir = lab.cni_dir().display().to_string();
    screen.quote(&lab.nobypass(&["cni", "status", "--cni-dir", &dir])?)?;
    let next = lab.meshed_pod("next")?;
    let Outcome { app_saw, plain, mesh, .. } = attempt(screen, lab, &next)?;
    ensure!((app_saw.as_str(), plain, mesh) == ("mesh", 0, 1), "that did not go through the proxy");
    screen.ok(&format!(
        "nobypass put the plugin back within {:.1} ms; the next pod is redirected",
        took.as_secs_f64() * 1000.0
    ))
}

fn clean_up(screen: &mut Screen, lab: &mut Lab) -> Result<()> {
    screen.step("Clean-up: an agent that ends leaves its programs in effect, until told otherwise")?;
    lab.stop_agent()?;
    screen.command("nobypass cleanup")?;
    screen.quote(&lab.nobypass(&["cleanup"])?)?;
    let gone = lab.nobypass(&["status"]).is_err();
    ensure!(gone, "`nobypass status` still finds something");
    screen.ok("no program of nobypass is attached any more")
}

/// The application's connection goes out, around the proxy.
fn bypass(screen: &Screen, lab: &mut Lab, pod: &Pod) -> Result<()> {
    let Outcome { app_saw, syns, plain, mesh } = attempt(screen, lab, pod)?;
    ensure!((app_saw.as_str(), syns, plain, mesh) == ("plain", 1, 1, 0), "that was no bypass");
    Ok(())
}

/// The application's connection does not get out.
fn blocked(screen: &Screen, lab: &mut Lab, pod: &Pod, sees: &str) -> Result<()> {
    let Outcome { app_saw, syns, plain, mesh } = attempt(screen, lab, pod)?;
    ensure!((app_saw.as_str(), syns, plain, mesh) == (sees, 0, 0, 0), "the connection was not blocked");
    Ok(())
}

/// One connection of the application, as it and the server saw it.
fn attempt(screen: &Screen, lab: &mut Lab, pod: &Pod) -> Result<Outcome> {
    let outcome = lab.connect(pod)?;
    let Outcome { app_saw, syns, plain, mesh } = &outcome;
    let name = &pod.spec.name;
    let came = match app_saw.as_str() {
        "plain" | "mesh" => format!("answered {app_saw:?}"),
        error => format!("no connection ({error})"),
    };
    screen.says("app", &format!("shop/{name} -> {EXT4}:{EXT_PORT}: {came}"))?;
    screen.says(
        "server",
        &format!("{syns} SYN arrived; {plain} connection past the proxy, {mesh} through it"),
    )?;
    Ok(outcome)
}

/// Connections of shop/early that were dropped so far.
fn dropped(lab: &Lab) -> Result<u64> {
    Ok(lab.status_of("early")?["dropped"].as_u64().unwrap_or(0))
}
