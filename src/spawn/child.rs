//! Waits, with a timeout, for a process that is not a rank.

use std::io;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// Returns how `child` ended, if it does within `timeout`.
///
/// ```
/// use std::{process::Command, time::Duration};
/// use nccl_tools::spawn::{end_within, wait_within};
///
/// let mut child = Command::new("sleep").arg("60").spawn()?;
/// assert!(wait_within(&mut child, Duration::from_millis(10))?.is_none());
/// assert!(end_within(&mut child, Duration::ZERO)?.is_none());
/// assert!(!child.wait()?.success());
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// The system's.
pub fn wait_within(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        let status = child.try_wait()?;
        if status.is_some() || begun.elapsed() >= timeout {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// As [`wait_within`]; a child that is still running then is killed and waited for.
///
/// # Errors
/// As [`wait_within`].
pub fn end_within(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let status = wait_within(child, timeout)?;
    if status.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(status)
}
