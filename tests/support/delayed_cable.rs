//! A cable between two network namespaces that can delay its traffic, for kernels without netem.
//!
//! Each end is a TAP device. A thread reads the frames of either end, keeps each for the delay, and writes it to the
//! other. A frame that finds [`LONGEST`] others before it is dropped, as by a switch.

#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Frames in transit in one direction.
const LONGEST: usize = 20_000;
/// Frames that are read from one end before the other has its turn.
const AT_ONCE: usize = 64;
/// More than a frame at any MTU.
const FRAME: usize = 1 << 16;
/// `TUNSETIFF` of linux/if_tun.h.
const SET_INTERFACE: libc::Ioctl = 0x4004_54ca;

/// The cable; it is removed when this value is dropped.
pub(crate) struct DelayedCable {
    nanoseconds: Arc<AtomicU64>,
    // Its close ends the thread.
    end: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl DelayedCable {
    /// Creates two new interfaces: the namespace and the name of each.
    pub(crate) fn lay(near: (&str, &str), far: (&str, &str)) -> io::Result<Self> {
        let ends = [interface(near.0, near.1)?, interface(far.0, far.1)?];
        let (end, ended) = UnixStream::pair()?;
        let nanoseconds = Arc::new(AtomicU64::new(0));
        let delay = Arc::clone(&nanoseconds);
        let thread = std::thread::Builder::new()
            .name("cable".into())
            .spawn(move || forward(&ends, &ended, &delay))?;
        Ok(Self {
            nanoseconds,
            end: Some(end),
            thread: Some(thread),
        })
    }

    /// Sets the delay of each frame from now on, in either direction.
    pub(crate) fn delay(&self, delay: Duration) {
        let nanoseconds = u64::try_from(delay.as_nanos()).expect("less than centuries");
        self.nanoseconds.store(nanoseconds, Ordering::Relaxed);
    }
}

impl Drop for DelayedCable {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Creates a TAP device in a namespace. It exists for as long as the file is open.
fn interface(namespace: &str, name: &str) -> io::Result<File> {
    let make = || {
        let namespace = File::open(format!("/run/netns/{namespace}"))?;
        // SAFETY: the descriptor is open; this thread alone moves, and ends with the closure.
        if unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")?;
        // SAFETY: the type holds numbers alone, for which zeros are a value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.len() >= request.ifr_name.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *place = byte as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
        // SAFETY: the descriptor is open, and this request reads and writes one `ifreq`, which ours is.
        if unsafe { libc::ioctl(file.as_raw_fd(), SET_INTERFACE, &mut request) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(file)
    };
    std::thread::scope(|scope| scope.spawn(make).join().expect("no panic"))
}

/// The frames in transit in one direction: when each arrives, and its bytes.
type Way = VecDeque<(Instant, Vec<u8>)>;

fn forward(ends: &[File; 2], ended: &UnixStream, nanoseconds: &AtomicU64) {
    let mut ways = [Way::new(), Way::new()];
    let mut buffer = vec![0; FRAME];
    loop {
        let next = ways.iter().filter_map(|way| way.front()).map(|it| it.0);
        let patience = next
            .min()
            .map(|at| at.saturating_duration_since(Instant::now()));
        let files = [ends[0].as_raw_fd(), ends[1].as_raw_fd(), ended.as_raw_fd()];
        let [near, far, over] = ready(files, patience);
        if over {
            return;
        }
        let delay = Duration::from_nanos(nanoseconds.load(Ordering::Relaxed));
        for (from, is_ready) in [near, far].into_iter().enumerate() {
            if is_ready {
                take(&ends[from], &mut ways[from], &mut buffer, delay);
            }
            deliver(&mut ways[from], &ends[1 - from]);
        }
    }
}

/// Which of the files are readable, or closed, after at most `patience`.
fn ready(files: [RawFd; 3], patience: Option<Duration>) -> [bool; 3] {
    let mut polled = files.map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    let limit = patience.map(|patience| libc::timespec {
        tv_sec: patience.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(patience.subsec_nanos()),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the array has as many elements as are said, the limit is null or lives as long as this function, and no
    // mask of signals is given.
    unsafe { libc::ppoll(polled.as_mut_ptr(), 3, limit, std::ptr::null()) };
    // Whatever it returned: files that it has not filled in are not ready.
    polled.map(|file| file.revents != 0)
}

fn take(mut end: &File, way: &mut Way, buffer: &mut [u8], delay: Duration) {
    for _ in 0..AT_ONCE {
        // Nothing more to read, or an interface that is down.
        let Ok(length) = end.read(buffer) else { return };
        if way.len() < LONGEST {
            way.push_back((Instant::now() + delay, buffer[..length].to_vec()));
        }
    }
}

fn deliver(way: &mut Way, mut end: &File) {
    let now = Instant::now();
    while let Some((at, _)) = way.front()
        && *at <= now
    {
        if let Some((_, frame)) = way.pop_front() {
            // An interface that is down, or full, loses it.
            let _ = end.write(&frame);
        }
    }
}
