//! Writes text to a reader that may have stopped reading: a full pipe would block the writer for ever, and the process
//! has to end.
//!
//! The last message of a process (`on_fatal`) and the reports of `nccl-run` are written this way.

use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::PIPE_BUF;

/// Writes `text`. Gives up when the reader has read nothing for `timeout`. Takes no lock of the standard library's
/// streams, which another thread may hold while it waits for the same reader.
pub fn write_within(to: impl AsFd + Send + Sync + 'static, text: &str, timeout: Duration) {
    let (to, text): (_, Arc<[u8]>) = (Arc::new(to), text.as_bytes().into());
    let (taken, heard) = mpsc::channel();
    let write = {
        let (to, text) = (Arc::clone(&to), Arc::clone(&text));
        move || {
            let mut rest = &text[..];
            while !rest.is_empty() {
                match rustix::io::write(&*to, piece(rest)) {
                    Ok(written) => rest = &rest[written..],
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => drop(poll(&mut [PollFd::new(&*to, PollFlags::OUT)], None)),
                    Err(_) => return,
                }
                let _ = taken.send(());
            }
        }
    };
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-write"))
        .spawn(write);
    match spawned {
        Ok(_) => while heard.recv_timeout(timeout).is_ok() {},
        Err(_) => write_alone(&*to, &text, timeout),
    }
}

/// Writes as much as a pipe that polls as writable accepts at once, for a process that cannot start a thread.
fn write_alone(to: impl AsFd, text: &[u8], timeout: Duration) {
    let mut fds = [PollFd::new(&to, PollFlags::OUT)];
    let timeout = Timespec::try_from(timeout).ok();
    if poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0) {
        let _ = rustix::io::write(&to, piece(text));
    }
}

/// Returns the beginning of `bytes` that a pipe with room accepts at once: whole lines if they are short enough,
/// otherwise a part of a line.
#[doc(hidden)]
pub fn piece(bytes: &[u8]) -> &[u8] {
    let Some(most) = bytes.get(..PIPE_BUF) else {
        return bytes;
    };
    let end = most.iter().rposition(|&byte| byte == b'\n');
    &most[..end.map_or(PIPE_BUF, |end| end + 1)]
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(5);

    #[test]
    fn without_a_thread_a_line_is_written_to_a_pipe_with_room_and_a_full_one_is_given_up() {
        let (mut from, mut to) = std::io::pipe().expect("a pipe");
        write_alone(&to, b"nccl: a line\n", TIMEOUT);
        let mut line = [0; 13];
        from.read_exact(&mut line).expect("a line");
        assert_eq!(&line, b"nccl: a line\n");
        fill(&mut to);
        write_alone(&to, b"nccl: a line\n", Duration::from_millis(10));
    }

    #[test]
    fn a_slow_reader_gets_all_and_one_that_takes_nothing_is_given_up() {
        let (mut from, mut to) = std::io::pipe().expect("a pipe");
        fill(&mut to);
        write_within(
            to.try_clone().expect("a descriptor"),
            "a line\n",
            Duration::from_millis(10),
        );
        let text = "a line that says more\n".repeat(10_000);
        let expected = format!("a line\n{text}");
        let read = std::thread::spawn(move || {
            let (mut all, mut piece) = (Vec::new(), [0; PIPE_BUF]);
            while let Ok(length @ 1..) = from.read(&mut piece) {
                all.extend_from_slice(&piece[..length]);
                std::thread::sleep(Duration::from_millis(2));
            }
            all
        });
        write_within(to, &text, TIMEOUT);
        let all = read.join().expect("a reader");
        let said = all.iter().position(|&byte| byte != 0).expect("text");
        assert_eq!(String::from_utf8_lossy(&all[said..]).len(), expected.len());
        assert!(all.ends_with(b"a line that says more\n"));
    }

    fn fill(to: &mut std::io::PipeWriter) {
        let flags = rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&*to, flags).expect("a flag");
        while to.write(&[0; PIPE_BUF]).is_ok() {}
        rustix::fs::fcntl_setfl(&*to, rustix::fs::OFlags::empty()).expect("a flag");
    }

    #[test]
    fn a_piece_ends_with_a_line_unless_the_line_is_longer() {
        assert_eq!(piece(b"a\nb"), b"a\nb");
        let lines = "0123456\n012\n".repeat(PIPE_BUF);
        let first = piece(lines.as_bytes());
        assert!(first.ends_with(b"\n") && first.len() > PIPE_BUF - 12);
        assert_eq!(piece(&[b'x'; 2 * PIPE_BUF]), [b'x'; PIPE_BUF]);
    }
}
