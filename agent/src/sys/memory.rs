//! Memory of this process.

use std::fs;
use std::io;

/// Unmaps pages of the program's own file that only its start needed, and says how many bytes those mappings have. They
/// stay in the page cache, and whatever is needed again is mapped from there by a minor fault.
///
/// Only mappings that nothing was ever written to: `Anonymous` of proc_pid_smaps(5) counts what is not the file's.
pub fn release_program() -> io::Result<usize> {
    let program = fs::read_link("/proc/self/exe")?;
    let mut released = 0;
    for (start, end) in untouched(&fs::read_to_string("/proc/self/smaps")?, &program.to_string_lossy()) {
        let length = end - start;
        let start = std::ptr::without_provenance_mut(start);
        // SAFETY: a mapping of this process as the kernel just listed it; nothing unmaps parts of the program. It is
        // private, of a file, not writable and without pages of its own, so that MADV_DONTNEED takes nothing away that
        // the next access would not read from the file again (madvise(2)).
        if unsafe { libc::madvise(start, length, libc::MADV_DONTNEED) } != 0 {
            return Err(io::Error::last_os_error());
        }
        released += length;
    }
    Ok(released)
}

/// Private mappings of `program` that are not writable and hold the file's pages only.
fn untouched(smaps: &str, program: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut candidate = None;
    for line in smaps.lines() {
        if let Some(range) = mapping(line) {
            let (_, path) = line.split_once('/').map_or((line, None), |(head, path)| (head, Some(path)));
            let permissions = line.split_whitespace().nth(1).unwrap_or_default();
            let ours = path.is_some_and(|path| program.strip_prefix('/') == Some(path));
            candidate = (ours && matches!(permissions, "r--p" | "r-xp")).then_some(range);
        } else if let Some(size) = line.strip_prefix("Anonymous:")
            && let Some(range) = candidate.take()
            && size.trim() == "0 kB"
        {
            found.push(range);
        }
    }
    found
}

/// `55d0c0a00000-55d0c0d86000 r--p 00000000 fd:01 1234 /bin/nobypass`
fn mapping(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    Some((number(start)?, number(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_never_written_to_is_given_back() {
        let block = |head: &str, anonymous: u32| {
            format!("{head}\nSize:  8 kB\nRss:   8 kB\nAnonymous:         {anonymous} kB\nVmFlags: rd mr\n")
        };
        let smaps = [
            block("1000-3000 r--p 00000000 fd:01 7                          /bin/nobypass", 0),
            block("3000-9000 r-xp 00002000 fd:01 7                          /bin/nobypass", 0),
            // Relocated, then made read-only.
            block("9000-a000 r--p 00008000 fd:01 7                          /bin/nobypass", 4),
            block("a000-b000 rw-p 00009000 fd:01 7                          /bin/nobypass", 0),
            block("b000-c000 rw-p 00000000 00:00 0                          [heap]", 4),
            block("c000-d000 r-xp 00000000 fd:01 8                          /lib/libc.so.6", 0),
            block("d000-e000 r--s 00000000 fd:01 7                          /bin/nobypass", 0),
            block("e000-f000 r--p 00000000 fd:01 9                          /bin/nobypass2", 0),
        ];
        assert_eq!(untouched(&smaps.concat(), "/bin/nobypass"), [(0x1000, 0x3000), (0x3000, 0x9000)]);
        assert_eq!(untouched("", "/bin/nobypass"), []);
    }

    #[test]
    fn the_program_goes_on() {
        assert!(release_program().unwrap() > 0);
        assert!(release_program().unwrap() > 0, "again");
        assert_eq!(format!("{:?}", std::time::Duration::from_millis(1500)), "1.5s");
    }
}
