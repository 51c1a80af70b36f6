//! A small traffic generator: does one thing an application might do and prints what it saw as one line of JSON.
//!
//! It uses std and libc alone, so that it starts fast, runs in a container image with nothing else in it, and no runtime
//! stands between the first system call and the network.

#![expect(clippy::print_stderr, reason = "usage errors of a test tool")]
#![expect(clippy::exit, reason = "exit codes are part of the interface")]

mod again;
mod first;
mod flood;
mod options;
mod place;
mod proxy;
mod raw;
mod report;
mod server;
mod sys;
mod tcp;
mod udp;

use options::Options;

const USAGE: &str = "\
usage: traffic [OPTIONS] COMMAND

one try, one report:
  tcp4|tcp6|mapped|tfo|mptcp ADDR PORT   connect, say hello, read the answer (plain or mesh)
  closed ADDR PORT                       connect where nothing listens; ok means refused
  nonblocking ADDR PORT                  as tcp, with a non-blocking socket
  hold ADDR PORT                         keep a connection busy until it breaks or standard input ends
  retries ADDR PORT                      how soon and how often the kernel will repeat the SYN (--mapped, --syn-retries N)
  udp ADDR PORT [N]                      N datagrams (--connected: by a connected socket) and their echoes
  ping ADDR                              ICMP echo by a raw socket
  rawsyn ADDR PORT                       TCP SYN by a raw socket (--hdrincl: IPv4 header included)
  afpacket ADDR PORT                     TCP SYN by a packet socket (IPv4; --dev eth0, --via GATEWAY)
many tries, one report:
  again ADDR PORT N                      N connects one after the other (--nonblock, --mapped, --interval-ms 0) and how
                                         long they took
  datagrams ADDR PORT N                  N datagrams, one after the other, and no answer awaited
  flood ADDR PORT N                      N connects, closed at once (--wait-ms 0, --parallel 1)
  first-packet ADDR PORT                 --parent DIR --count N --enter procs|clone3 (--parallel 128, --prefix UID):
                                         new cgroup, new process, first action connect
until a signal, or the end of standard input with --stdin (where the line `stats` asks for counts):
  server PORT...                         answers plain or mesh on TCP, echoes UDP; IPv4 and IPv6
  proxy PORT...                          transparent proxy by original destination (--tproxy, --mark N;
                                         --passthrough PORT: what comes there goes on from 127.0.0.6 or ::6)
  chatter ADDR PORT                      as tcp4 again and again (--interval-ms 20); a line a change, and a line for each
                                         answer that is plain
  pause                                  nothing; reaps children
options:
  --cgroup DIR  --netns PATH  --gid N  --uid N   where and as whom, applied in this order before anything else
  --keep-caps                                     keep capabilities across --uid
  --timeout-ms N                                  bound of each wait (default 2000; first-packet: 250)";

fn main() {
    // A process with a handler ends on SIGTERM also as process 1 of a container.
    sys::exit_on_signals();
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(problem) => usage(&problem),
    };
    if let Err(problem) = place::apply(&options) {
        eprintln!("traffic: {problem}");
        std::process::exit(71);
    }
    match run(&options) {
        Ok(line) => report::say(&line),
        Err(problem) => usage(&problem),
    }
}

fn run(o: &Options) -> Result<String, String> {
    let command = o.word(0)?;
    match command {
        "tcp4" | "tcp6" | "mapped" | "tfo" | "mptcp" | "closed" => tcp::once(command, o.target()?, o),
        "nonblocking" => tcp::nonblocking(o.target()?, o),
        "retries" => tcp::retries(o.target()?, o),
        "hold" => tcp::hold(o.target()?, o),
        "chatter" => tcp::chatter(o.target()?, o),
        "udp" => udp::exchange(o.target()?, o),
        "ping" => udp::ping(o.address(1)?, o),
        "rawsyn" => raw::syn(o.target()?, o),
        "afpacket" => raw::packet(o.target()?, o),
        "again" => again::run(o.target()?, o),
        "datagrams" => udp::datagrams(o.target()?, o),
        "flood" => flood::run(o.target()?, o),
        "first-packet" => first::run(o.target()?, o),
        "server" => server::run(&o.ports()?, o),
        "proxy" => proxy::run(&o.ports()?, o),
        "pause" => sys::pause(),
        other => Err(format!("no such command: {other}")),
    }
}

fn usage(problem: &str) -> ! {
    eprintln!("traffic: {problem}\n{USAGE}");
    std::process::exit(64);
}
