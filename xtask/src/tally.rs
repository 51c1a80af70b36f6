//! Counting: libtest's result lines, exit codes, and the last line of every run.

use std::fmt;
use std::ops::AddAssign;
use std::process::ExitCode;

/// How many checks or tests did what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Tally {
    pub const PASSED: Self = Self { passed: 1, failed: 0, skipped: 0 };
    pub const FAILED: Self = Self { passed: 0, failed: 1, skipped: 0 };
    pub const SKIPPED: Self = Self { passed: 0, failed: 0, skipped: 1 };

    pub const fn of(passed: bool) -> Self {
        if passed { Self::PASSED } else { Self::FAILED }
    }

    /// Success takes at least one test that passed: a run in which nothing ran shows nothing.
    pub fn exit_code(self) -> ExitCode {
        if self.failed == 0 && self.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        let Self { passed, failed, skipped } = other;
        self.passed += passed;
        self.failed += failed;
        self.skipped += skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, skipped } = self;
        write!(f, "{passed} passed, {failed} failed")?;
        if *skipped > 0 {
            write!(f, ", {skipped} skipped")?;
        }
        Ok(())
    }
}

/// Follows the output of one `cargo test`. A test program that dies never prints its result, so a start without
/// an end is a failure, and so is a cargo that fails without any failed test (it did not compile).
#[derive(Debug, Default)]
pub struct Libtest {
    counted: Tally,
    running: u64,
}

impl Libtest {
    pub fn line(&mut self, line: &str) {
        let line = line.trim_end();
        if is_start(line) {
            self.running += 1;
        } else if let Some(tally) = parse_result(line) {
            self.counted += tally;
            self.running = self.running.saturating_sub(1);
        }
    }

    /// What the whole run amounts to, with cargo's exit status.
    pub fn finish(mut self, success: bool) -> Tally {
        if !success {
            self.counted.failed += self.running;
            self.counted.failed = self.counted.failed.max(1);
        }
        self.counted
    }
}

/// `running 3 tests`
fn is_start(line: &str) -> bool {
    let count = line.strip_prefix("running ");
    let count = count.and_then(|rest| rest.strip_suffix(" tests").or_else(|| rest.strip_suffix(" test")));
    count.is_some_and(|count| count.parse::<u64>().is_ok())
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.00s`
///
/// An ignored test here is the body of another one, which runs it in a process of its own (`rules` sees to that), so
/// it is no test that was skipped.
fn parse_result(line: &str) -> Option<Tally> {
    let rest = line.strip_prefix("test result: ")?;
    let rest = rest.strip_prefix("ok. ").or_else(|| rest.strip_prefix("FAILED. "))?;
    let mut parts = rest.split("; ");
    let mut count = |what| parts.next()?.strip_suffix(what)?.trim_end().parse().ok();
    Some(Tally { passed: count("passed")?, failed: count("failed")?, skipped: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OK: &str =
        "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.0s";
    const BAD: &str =
        "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s";

    fn count(lines: &[&str], success: bool) -> Tally {
        let mut libtest = Libtest::default();
        lines.iter().for_each(|line| libtest.line(line));
        libtest.finish(success)
    }

    #[test]
    fn reads_result_lines() {
        let tally = |passed, failed, skipped| Some(Tally { passed, failed, skipped });
        for (line, want) in [
            (OK, tally(3, 0, 0)),
            (BAD, tally(1, 2, 0)),
            ("test result: maybe. 1 passed; 2 failed; 0 ignored", None),
            ("  test result: ok. 3 passed; 0 failed; 1 ignored", None),
            ("test result: ok. x passed; 0 failed; 1 ignored", None),
            ("test result: ok. 3 passed", None),
            ("test a::b ... ok", None),
            ("", None),
        ] {
            assert_eq!(parse_result(line), want, "{line}");
        }
    }

    #[test]
    fn reads_start_lines() {
        for (line, want) in [
            ("running 1 test", true),
            ("running 12 tests", true),
            ("running tests", false),
            ("running x tests", false),
            ("test running 1 test", false),
        ] {
            assert_eq!(is_start(line), want, "{line}");
        }
    }

    #[test]
    fn sums_several_programs() {
        let lines = ["running 4 tests", OK, "", "running 3 tests", BAD];
        assert_eq!(count(&lines, false), Tally { passed: 4, failed: 2, skipped: 0 });
    }

    #[test]
    fn a_program_that_dies_is_a_failure() {
        assert_eq!(count(&["running 4 tests", OK, "running 9 tests", "test a ... ok"], false).failed, 1);
        assert_eq!(count(&["running 9 tests", "running 3 tests", BAD], false).failed, 3);
    }

    #[test]
    fn a_failing_cargo_is_never_green() {
        assert_eq!(count(&[], false), Tally::FAILED);
        assert_eq!(count(&["running 4 tests", OK], false).failed, 1);
        assert_eq!(count(&["running 4 tests", OK], true).failed, 0);
    }

    #[test]
    fn shows_skipped_only_if_there_are_any() {
        assert_eq!(Tally { passed: 3, failed: 1, skipped: 0 }.to_string(), "3 passed, 1 failed");
        assert_eq!(Tally { passed: 3, failed: 0, skipped: 2 }.to_string(), "3 passed, 0 failed, 2 skipped");
    }

    #[test]
    fn success_takes_a_test_that_passed() {
        let success = |tally: Tally| tally.exit_code() == ExitCode::SUCCESS;
        assert!(success(Tally { passed: 1, failed: 0, skipped: 5 }));
        assert!(!success(Tally { passed: 9, failed: 1, skipped: 0 }));
        assert!(!success(Tally::SKIPPED));
        assert!(!success(Tally::default()));
    }
}
