//! NCCL's log: `NCCL_DEBUG`, `NCCL_DEBUG_SUBSYS`, `NCCL_DEBUG_FILE`, timestamps, and the last
//! error.
//!
//! All code under `nccl` writes to the log by [`warn!`] and [`info!`], in NCCL's own line format, because people and tools
//! parse it. A warning is also stored as the process's last error, whether it is printed or not. File and line in a warning are
//! the emulator's own.

use std::cell::Cell;
use std::ffi::CString;
use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use cuda_emulator::sync::Mutex;

/// The subject of a line; the bits of `NCCL_DEBUG_SUBSYS`.
pub(crate) mod subsystem {
    pub(crate) const INIT: u32 = 0x1;
    pub(crate) const COLL: u32 = 0x2;
    pub(crate) const P2P: u32 = 0x4;
    pub(crate) const NET: u32 = 0x10;
    pub(crate) const ENV: u32 = 0x80;
    pub(crate) const REG: u32 = 0x1000;
    pub(crate) const BOOTSTRAP: u32 = 0x2000;
    pub(crate) const DESTROY: u32 = 0x10000;
    pub(crate) const ALL: u32 = u32::MAX;
}

const SUBSYSTEMS: &[(&str, u32)] = &[
    ("INIT", subsystem::INIT),
    ("COLL", subsystem::COLL),
    ("P2P", subsystem::P2P),
    ("SHM", 0x8),
    ("NET", subsystem::NET),
    ("GRAPH", 0x20),
    ("TUNING", 0x40),
    ("ENV", subsystem::ENV),
    ("ALLOC", 0x100),
    ("CALL", 0x200),
    ("PROXY", 0x400),
    ("NVLS", 0x800),
    ("BOOTSTRAP", subsystem::BOOTSTRAP),
    ("REG", subsystem::REG),
    ("PROFILE", 0x4000),
    ("RAS", 0x8000),
    ("DESTROY", subsystem::DESTROY),
    ("ALLOC_HOST", 0x20000),
    ("ALL", subsystem::ALL),
];

/// The level of detail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    None,
    Version,
    Warn,
    Info,
    Abort,
    Trace,
}

const LEVELS: &[(&str, Level)] = &[
    ("VERSION", Level::Version),
    ("WARN", Level::Warn),
    ("INFO", Level::Info),
    ("ABORT", Level::Abort),
    ("TRACE", Level::Trace),
];

const NOT_READ: u32 = u32::MAX;
/// The level, or `NOT_READ`; read without the lock by every line that is not going to be printed.
static LEVEL: AtomicU32 = AtomicU32::new(NOT_READ);
static MASK: AtomicU32 = AtomicU32::new(0);
static OUTPUT: Mutex<Option<Output>> = Mutex::new(None);

struct Output {
    file: Option<File>,
    host: String,
    stamped: u32,
    format: CString,
}

thread_local! {
    /// The device of the communicator that a background thread works for.
    static DEVICE: Cell<Option<i32>> = const { Cell::new(None) };
}

/// Marks the lines of this thread with `device`, as if it were current, until it is dropped.
pub(crate) struct OnDevice(Option<i32>);

/// Marks the lines of this thread with `device`.
pub(crate) fn on_device(device: i32) -> OnDevice {
    OnDevice(DEVICE.replace(Some(device)))
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        DEVICE.set(self.0);
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn level_from(value: Option<&str>) -> Level {
    let Some(value) = value else {
        return Level::None;
    };
    LEVELS
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case(value))
        .map_or(Level::None, |(_, level)| *level)
}

/// Parses a list such as `INIT,NET`, or one with `^` in front, which selects all others.
fn mask_from(value: Option<&str>) -> u32 {
    let Some(value) = value else {
        return subsystem::INIT | subsystem::BOOTSTRAP | subsystem::ENV;
    };
    let (invert, list) = value
        .strip_prefix('^')
        .map_or((false, value), |list| (true, list));
    let mask = list
        .split(',')
        .filter_map(|word| {
            SUBSYSTEMS
                .iter()
                .find(|(name, _)| name.eq_ignore_ascii_case(word))
        })
        .fold(0, |mask, (_, bits)| mask | bits);
    if invert { !mask } else { mask }
}

fn stamped_from(value: Option<&str>) -> u32 {
    let Some(value) = value else {
        return 1 << Level::Warn as u32;
    };
    let (invert, list) = value
        .strip_prefix('^')
        .map_or((false, value), |list| (true, list));
    let mask = list.split(',').fold(0, |mask, word| {
        if word.eq_ignore_ascii_case("ALL") {
            return u32::MAX;
        }
        let level = level_from(Some(word));
        if level == Level::None {
            mask
        } else {
            mask | 1 << level as u32
        }
    });
    if invert { !mask } else { mask }
}

/// Returns the host's name up to its first dot. Characters that are invalid in a file name or a format are replaced.
pub(crate) fn host() -> String {
    let mut buffer = [0u8; 256];
    // SAFETY: the buffer is valid for its length; the last byte stays NUL.
    if unsafe { libc::gethostname(buffer.as_mut_ptr().cast(), buffer.len() - 1) } != 0 {
        return "unknown".to_owned();
    }
    let name = buffer
        .split(|&byte| byte == 0 || byte == b'.')
        .next()
        .unwrap_or_default();
    String::from_utf8_lossy(name).replace(['%', '/'], "-")
}

/// Expands `%h` and `%p` of `NCCL_DEBUG_FILE`.
fn expand(pattern: &str, host: &str, pid: u32) -> String {
    let mut name = String::new();
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            name.push(character);
            continue;
        }
        match characters.next() {
            Some('h') => name.push_str(host),
            Some('p') => name.push_str(&pid.to_string()),
            Some('%') | None => name.push('%'),
            Some(other) => name.extend(['%', other]),
        }
    }
    name
}

fn open() -> Output {
    let level = level_from(variable("NCCL_DEBUG").as_deref());
    let host = host();
    let file = variable("NCCL_DEBUG_FILE")
        .filter(|name| level > Level::Version && !name.is_empty())
        .and_then(|name| File::create(expand(&name, &host, std::process::id())).ok());
    let format = variable("NCCL_DEBUG_TIMESTAMP_FORMAT")
        .unwrap_or_else(|| "[%F %T] ".to_owned())
        .replace('_', " ");
    MASK.store(
        mask_from(variable("NCCL_DEBUG_SUBSYS").as_deref()),
        Ordering::Relaxed,
    );
    LEVEL.store(level as u32, Ordering::Release);
    Output {
        file,
        host,
        stamped: stamped_from(variable("NCCL_DEBUG_TIMESTAMP_LEVELS").as_deref()),
        format: CString::new(format).unwrap_or_default(),
    }
}

/// Implements `ncclResetDebugInit`: the variables are read again at the next line.
pub(crate) fn reset() {
    let mut output = OUTPUT.lock();
    *output = None;
    LEVEL.store(NOT_READ, Ordering::Release);
}

/// Returns whether lines of `level` about `about` are printed.
pub(crate) fn enabled(level: Level, about: u32) -> bool {
    if LEVEL.load(Ordering::Acquire) == NOT_READ {
        let mut output = OUTPUT.lock();
        output.get_or_insert_with(open);
    }
    LEVEL.load(Ordering::Acquire) >= level as u32 && MASK.load(Ordering::Relaxed) & about != 0
}

fn stamp(line: &mut String, format: &CString) {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = now.as_secs() as libc::time_t;
    let mut buffer = [0u8; 256];
    // SAFETY: all-zero is a valid `tm`; the pointers are to live locals, and `strftime` writes at
    // most the buffer's length.
    let written = unsafe {
        let mut parts: libc::tm = std::mem::zeroed();
        libc::localtime_r(&seconds, &mut parts);
        libc::strftime(
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            format.as_ptr(),
            &parts,
        )
    };
    line.push_str(&String::from_utf8_lossy(&buffer[..written]));
}

/// Returns the time in a format of `strftime`.
pub(crate) fn timestamp(format: &std::ffi::CStr) -> String {
    let mut text = String::new();
    stamp(&mut text, &format.to_owned());
    text
}

/// Prints a line for which [`enabled`] returned true. `place` is the file and line of a warning.
pub(crate) fn print(level: Level, place: Option<(&str, u32)>, message: fmt::Arguments<'_>) {
    let device = DEVICE
        .get()
        .unwrap_or_else(|| cuda_emulator::driver::current_device().unwrap_or(0));
    // SAFETY: always succeeds.
    let thread = unsafe { libc::gettid() };
    let mut guard = OUTPUT.lock();
    let output = guard.get_or_insert_with(open);
    let mut line = String::new();
    if level == Level::Warn {
        line.push('\n');
    }
    if output.stamped & 1 << level as u32 != 0 {
        stamp(&mut line, &output.format);
    }
    let pid = std::process::id();
    let result = match (level, place) {
        (Level::Version, _) => writeln!(line, "{message}"),
        (Level::Warn, Some((file, number))) => {
            let file = file.rsplit('/').next().unwrap_or(file);
            writeln!(
                line,
                "{}:{pid}:{thread} [{device}] {file}:{number} NCCL WARN {message}",
                output.host
            )
        }
        _ => writeln!(
            line,
            "{}:{pid}:{thread} [{device}] NCCL INFO {message}",
            output.host
        ),
    };
    result.expect("writing to a string does not fail");
    // A failed write to the log does not fail the call.
    let _ = match &mut output.file {
        Some(file) => file.write_all(line.as_bytes()),
        None => {
            let mut stdout = std::io::stdout().lock();
            stdout
                .write_all(line.as_bytes())
                .and_then(|()| stdout.flush())
        }
    };
}

/// The text of the last warning of any thread. As in NCCL, C code may read it while it changes; the last byte is always NUL.
static LAST_ERROR: [AtomicU8; 1024] = [const { AtomicU8::new(0) }; 1024];

/// Returns the address of the last error's text, for `ncclGetLastError`.
pub(crate) fn last_error() -> *const std::ffi::c_char {
    LAST_ERROR.as_ptr().cast()
}

/// Writes a text, truncated to fit, and a NUL.
fn keep(place: &[AtomicU8], text: &str) {
    let room = place.len() - 1;
    let text = &text.as_bytes()[..text.len().min(room)];
    for (to, byte) in place.iter().zip(text) {
        to.store(*byte, Ordering::Relaxed);
    }
    place[text.len()].store(0, Ordering::Relaxed);
}

/// Stores `message` as the last error, and prints it if warnings are enabled. Called by [`warn!`].
pub(crate) fn keep_and_print(file: &str, line: u32, message: fmt::Arguments<'_>) {
    {
        let _writers = OUTPUT.lock();
        keep(&LAST_ERROR, &message.to_string());
    }
    if enabled(Level::Warn, subsystem::ALL) {
        print(Level::Warn, Some((file, line)), message);
    }
}

/// Reports an error in NCCL's words, and stores it as the last error.
macro_rules! warning {
    ($($argument:tt)*) => {
        $crate::nccl::debug::keep_and_print(file!(), line!(), format_args!($($argument)*))
    };
}

/// Prints a line if `NCCL_DEBUG=INFO`; the first argument is its subject.
macro_rules! information {
    ($about:expr, $($argument:tt)*) => {
        if $crate::nccl::debug::enabled($crate::nccl::debug::Level::Info, $about) {
            $crate::nccl::debug::print($crate::nccl::debug::Level::Info, None, format_args!($($argument)*));
        }
    };
}

pub(crate) use information as info;
pub(crate) use warning as warn;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_subsystems_are_read_as_nccl_reads_them() {
        assert_eq!(level_from(Some("info")), Level::Info);
        assert_eq!(level_from(Some("nonsense")), Level::None);
        assert_eq!(
            mask_from(Some("INIT,net")),
            subsystem::INIT | subsystem::NET
        );
        assert_eq!(mask_from(Some("^INIT")), !subsystem::INIT);
        assert_eq!(mask_from(None) & subsystem::COLL, 0);
        assert_eq!(
            stamped_from(Some("INFO,WARN")),
            1 << Level::Info as u32 | 1 << Level::Warn as u32
        );
    }

    #[test]
    fn the_debug_file_is_named_after_host_and_process() {
        assert_eq!(
            expand("/tmp/nccl.%h.%p.%%%x%", "node-a", 7),
            "/tmp/nccl.node-a.7.%%x%"
        );
    }

    #[test]
    fn a_long_text_is_cut_and_stays_a_c_string() {
        let kept = [const { AtomicU8::new(b'?') }; 8];
        let read = || {
            kept.iter()
                .map(|byte| byte.load(Ordering::Relaxed) as char)
                .collect::<String>()
        };
        keep(&kept, "far too long");
        assert_eq!(read(), "far too\0");
        keep(&kept, "short");
        assert_eq!(read(), "short\0o\0");
    }
}
