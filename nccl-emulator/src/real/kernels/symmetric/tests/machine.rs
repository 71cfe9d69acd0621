//! Devices whose ranks map each other's buffers at equal distances, and a scheduler that parts works as NCCL's does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_emulator::sync::Mutex;
use nccl_sys::Version;

use super::super::super::asked::Types;
use super::super::super::launch::{Failure, Interpreter, Progress, Refused, Running};
use super::super::super::memory::{Cause, Lease, Memory, View, Violation};
use super::super::super::tests::types::Release;

/// Units of 4 GiB between two ranks' mappings.
pub(super) const STRIDE: u64 = 2;
const BARRIERS: u64 = 64;

/// Memory by device address. Nothing outside of what was mapped may be used.
#[derive(Default)]
pub(super) struct Devices {
    ranges: Mutex<BTreeMap<u64, Range>>,
}

struct Range {
    words: Box<[u64]>,
    shift: usize,
    length: usize,
    freed: Arc<AtomicBool>,
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(&'static str);

struct Held {
    freed: Arc<AtomicBool>,
    address: u64,
}

fn refusal(address: u64, length: usize, what: &'static str) -> Violation {
    Violation {
        address,
        length,
        cause: Cause::Driver(Arc::new(Refusal(what))),
    }
}

impl Lease for Held {
    fn still_valid(&self) -> Result<(), Violation> {
        match self.freed.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(refusal(self.address, 0, "freed")),
        }
    }
}

impl Memory for Devices {
    fn view(&self, address: u64, length: usize) -> Result<View, Violation> {
        let mut ranges = self.ranges.lock();
        let Some((&base, range)) = ranges.range_mut(..=address).next_back() else {
            return Err(refusal(address, length, "nothing is mapped"));
        };
        let offset = (address - base) as usize;
        if offset + length > range.length {
            return Err(refusal(address, length, "out of bounds"));
        }
        let freed = range.freed.clone();
        if freed.load(Ordering::Relaxed) {
            return Err(refusal(address, length, "freed"));
        }
        let pointer = range.words.as_mut_ptr().cast::<u8>();
        let pointer = pointer.wrapping_add(range.shift + offset);
        // SAFETY: ranges live until the devices do, which outlive their kernels.
        Ok(unsafe { View::new(address, pointer, length, Box::new(Held { freed, address })) })
    }
}

impl Devices {
    pub(super) fn map(&self, address: u64, length: usize) {
        let shift = (address % 8) as usize;
        let range = Range {
            words: vec![0; (length + shift).div_ceil(8).max(1)].into(),
            shift,
            length,
            freed: Arc::default(),
        };
        self.ranges.lock().insert(address, range);
    }

    pub(super) fn free(&self, address: u64) {
        let ranges = self.ranges.lock();
        ranges[&address].freed.store(true, Ordering::Relaxed);
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        self.view(address, bytes.len())
            .unwrap()
            .write(0, bytes)
            .unwrap();
    }

    pub(super) fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let view = self.view(address, length).unwrap();
        view.read(0, &mut bytes).unwrap();
        bytes
    }

    pub(super) fn word(&self, address: u64) -> u64 {
        u64::from_le_bytes(self.read(address, 8).try_into().unwrap())
    }
}

/// A buffer of one rank: in a window, or not.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// The window's address in the device's memory; 0 if there is none.
    pub(super) window: u64,
    /// In the window, or an address.
    pub(super) offset: u64,
    pub(super) address: u64,
}

/// One collective of a launch, as a rank calls it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) input: Place,
    pub(super) output: Place,
    pub(super) elements: usize,
    pub(super) argument: u64,
}

pub(super) struct Machine {
    pub(super) devices: Arc<Devices>,
    pub(super) ranks: usize,
    pub(super) release: Release,
    interpreter: Interpreter,
    resources: u64,
    next: Mutex<u64>,
    random: Mutex<u64>,
}

pub(super) const VERSIONS: [Release; 3] = [Release::V2_32_3, Release::V2_30_7, Release::V2_27_7];

fn put(bytes: &mut [u8], types: Release, ty: &str, path: &str, value: u64) {
    let field = types.field(ty, path).unwrap();
    let size = field.size.min(8);
    let mut word = [0; 8];
    word[..size].copy_from_slice(&bytes[field.offset..][..size]);
    let mut old = u64::from_le_bytes(word);
    match field.bits {
        Some((first, _)) => old |= value << first,
        None => old = value,
    }
    bytes[field.offset..][..size].copy_from_slice(&old.to_le_bytes()[..size]);
}

impl Machine {
    pub(super) fn new(release: Release, ranks: usize, seed: u64) -> Self {
        let (rows, version) = match release {
            Release::V2_32_3 => (1999, Version::new(2, 32, 3)),
            Release::V2_30_7 => (1999, Version::new(2, 30, 7)),
            Release::V2_27_7 => (1996, Version::new(2, 27, 7)),
        };
        let machine = Self {
            devices: Arc::default(),
            ranks,
            release,
            interpreter: Interpreter::new(&release, &vec![-1; rows], version).unwrap(),
            resources: 0,
            next: Mutex::new(1 << 40),
            random: Mutex::new(seed | 1),
        };
        let resources = machine.addresses();
        for rank in 0..ranks as u64 {
            let at = resources + ((rank * STRIDE) << 32);
            machine.devices.map(at, machine.resources_length());
        }
        Self {
            resources,
            ..machine
        }
    }

    /// Barriers first, then lines, as long as NCCL makes them.
    fn resources_length(&self) -> usize {
        let ranks = self.ranks as u64;
        let length = match self.release {
            Release::V2_27_7 => 1024 + 256 * ranks + 64 * 2 * 2 * (4096 * ranks).max(32768),
            _ => self.lines() * 128 + BARRIERS * (1 + 2 * self.slots()) * 16,
        };
        length as usize
    }

    /// The handle of the lines.
    fn lines(&self) -> u64 {
        (BARRIERS * 4 * (3 + self.ranks as u64)).div_ceil(128)
    }

    fn slots(&self) -> u64 {
        512 * self.ranks as u64
    }

    /// Sets how often barriers and lines were used.
    pub(super) fn set_epochs(&self, epoch: u32) {
        for rank in 0..self.ranks as u64 {
            let base = self.resources + ((rank * STRIDE) << 32);
            for block in 0..BARRIERS {
                let (barrier, inbox, lines) = match self.release {
                    Release::V2_27_7 => (
                        512 + 4 * block,
                        1024 + 4 * block * self.ranks as u64,
                        4 * block,
                    ),
                    _ => (
                        4 * (BARRIERS + block),
                        4 * (3 * BARRIERS + block * self.ranks as u64),
                        self.lines() * 128 + block * (1 + 2 * self.slots()) * 16,
                    ),
                };
                let word = epoch.to_le_bytes();
                self.devices.write(base + barrier, &word);
                self.devices.write(base + lines, &word);
                for peer in 0..self.ranks as u64 {
                    self.devices.write(base + inbox + 4 * peer, &word);
                }
            }
        }
    }

    /// Addresses that nothing uses yet, for every rank.
    fn addresses(&self) -> u64 {
        let mut next = self.next.lock();
        let address = *next;
        *next += 1 << 40;
        address
    }

    pub(super) fn random(&self) -> u64 {
        let mut random = self.random.lock();
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        *random
    }

    pub(super) fn below(&self, limit: usize) -> usize {
        (self.random() % limit as u64) as usize
    }

    /// A window of `length` bytes on every rank, of which a collective uses what is behind `offset`.
    pub(super) fn window(&self, offset: u64, length: usize) -> Vec<Place> {
        let base = self.addresses();
        let size = self.release.size_of("ncclWindow_vidmem").unwrap_or(8);
        (0..self.ranks as u64)
            .map(|rank| {
                let start = base + ((rank * STRIDE) << 32);
                self.devices.map(start + offset, length);
                let (mut window, mut at) = (0, start + offset);
                if self.release != Release::V2_27_7 {
                    let ty = "ncclWindow_vidmem";
                    let mut bytes = vec![0; size];
                    for (path, value) in [
                        ("lsaFlatBase", base),
                        ("lsaRank", rank),
                        ("stride4G", STRIDE),
                    ] {
                        put(&mut bytes, self.release, ty, path, value);
                    }
                    window = self.private(size);
                    self.devices.write(window, &bytes);
                    at = offset;
                }
                Place {
                    window,
                    offset: at,
                    address: start + offset,
                }
            })
            .collect()
    }

    /// Memory that no peer maps.
    pub(super) fn private(&self, length: usize) -> u64 {
        let address = self.addresses();
        self.devices.map(address, length);
        address
    }

    /// What a rank's kernel is launched with for `calls` on `channels` channels. `element` is the size that the collective
    /// counts in; `profile` are the three addresses that a profiler's kernel writes to, and the number of the launch.
    pub(super) fn parameters(
        &self,
        rank: usize,
        calls: &[Call],
        element: usize,
        channels: usize,
        abort_flag: u64,
        profile: Option<([u64; 3], u64)>,
    ) -> (Vec<u8>, usize) {
        if self.release == Release::V2_27_7 {
            let [call] = calls else {
                panic!("2.27 has one work in a launch")
            };
            let ty = "ncclSymDevArgs";
            let mut bytes = vec![0; self.release.size_of(ty).unwrap()];
            for (path, value) in [
                ("comm.base", self.resources + ((rank as u64 * STRIDE) << 32)),
                ("comm.stride4G", STRIDE),
                ("comm.nRanks", self.ranks as u64),
                ("comm.rank", rank as u64),
                ("redOpArg", call.argument),
                ("nElts", call.elements as u64),
                ("input", call.input.offset),
                ("output", call.output.offset),
            ] {
                put(&mut bytes, self.release, ty, path, value);
            }
            return (bytes, channels);
        }
        let ty = "ncclSymkDevWorkArgs";
        let mut bytes = vec![0; self.release.size_of(ty).unwrap()];
        let ranks = self.ranks as u64;
        for (path, value) in [
            ("kcomm.devComm.rank", rank as u64),
            ("kcomm.devComm.nRanks", ranks),
            ("kcomm.devComm.lsaRank", rank as u64),
            ("kcomm.devComm.lsaSize", ranks),
            (
                "kcomm.devComm.resourceWindow_inlined.lsaFlatBase",
                self.resources,
            ),
            ("kcomm.devComm.resourceWindow_inlined.stride4G", STRIDE),
            ("kcomm.devComm.lsaBarrier.bufHandle", 0),
            ("kcomm.devComm.lsaBarrier.nBarriers", BARRIERS),
            ("kcomm.devComm.abortFlag", abort_flag),
            ("kcomm.lsaLLA2A.bufHandle", self.lines()),
            ("kcomm.lsaLLA2A.nSlots", self.slots()),
            ("nMaxChannels", channels as u64),
        ] {
            put(&mut bytes, self.release, ty, path, value);
        }
        if let Some((targets, number)) = profile {
            for (path, value) in [
                "kcomm.workStarted",
                "kcomm.workCompleted",
                "kcomm.workPhases",
            ]
            .into_iter()
            .zip(targets)
            {
                put(&mut bytes, self.release, ty, path, value);
            }
            put(&mut bytes, self.release, ty, "profilerMode", 3);
            for channel in 0..channels as u64 {
                bytes.extend((number + channel).to_le_bytes());
            }
            bytes.resize(bytes.len().next_multiple_of(16), 0);
        }
        let (ranges, works, used) = self.schedule(calls, element, channels);
        for (work, fraction) in ranges {
            bytes.extend(work.to_le_bytes());
            bytes.extend(fraction.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        for (call, (first, count)) in calls.iter().zip(works) {
            let ty = "ncclSymkDevWork";
            let mut work = vec![0; self.release.size_of(ty).unwrap()];
            for (path, value) in [
                ("redOpArg", call.argument),
                ("nElts", call.elements as u64),
                ("inputWin", call.input.window),
                ("outputWin", call.output.window),
                ("inputOff", call.input.offset),
                ("outputOff", call.output.offset),
                ("sChannelId", first),
                ("nChannels", count),
            ] {
                put(&mut work, self.release, ty, path, value);
            }
            bytes.extend(work);
        }
        (bytes, used)
    }

    /// The ends of the channels' parts, the channels of each work, and how many channels are used.
    #[allow(clippy::type_complexity)]
    fn schedule(
        &self,
        calls: &[Call],
        element: usize,
        channels: usize,
    ) -> (Vec<(u16, u16)>, Vec<(u64, u64)>, usize) {
        let cell = 1024 / element;
        let cells = |call: &Call| call.elements.div_ceil(cell);
        let total: usize = calls.iter().map(cells).sum();
        let per_channel = total.div_ceil(channels);
        let mut ranges = vec![(0, 0); channels];
        let mut works = Vec::new();
        let (mut channel, mut left, mut on_channel) = (0, per_channel, 0);
        for (index, call) in calls.iter().enumerate() {
            let all = cells(call);
            let mut rest = all;
            let (mut first, mut count) = (0xffff, 0);
            while channel < channels {
                ranges[channel].0 = index as u16;
                if on_channel == 0 {
                    if count == 0 {
                        (first, count) = (channel as u64, 1);
                    } else if rest > left || left - rest <= 1 || index + 1 == calls.len() {
                        count += 1;
                    }
                } else if all <= left {
                    (first, count) = (channel as u64, 1);
                }
                if rest <= left {
                    ranges[channel].1 = 0xffff;
                    left -= rest;
                    on_channel += 1;
                    if left == 0 {
                        (channel, left, on_channel) = (channel + 1, per_channel, 0);
                    }
                    break;
                }
                rest -= left;
                ranges[channel].1 = ((0x10000 * (all - rest)).div_ceil(all) - 1) as u16;
                (channel, left, on_channel) = (channel + 1, per_channel, 0);
            }
            works.push((first, count));
        }
        (ranges, works, channel + usize::from(left < per_channel))
    }

    pub(super) fn launch(
        &self,
        kernel: &str,
        (parameters, blocks): (Vec<u8>, usize),
    ) -> Result<Running, Refused> {
        let (prefix, arguments) = match self.release {
            Release::V2_27_7 => ("ncclSymDevKernel_", "14ncclSymDevArgs"),
            _ => ("ncclSymkDevKernel_", "21ncclSymkDevWorkArgs4K"),
        };
        let name = format!("{prefix}{kernel}");
        let name = format!("_Z{}{name}{arguments}", name.len());
        let grid = [blocks as u32, 1, 1];
        let memory = self.devices.clone();
        self.interpreter
            .launch(&name, grid, [512, 1, 1], parameters, memory)
    }

    /// Steps kernels in random order until all are done.
    pub(super) fn finish(&self, mut kernels: Vec<Running>) -> Result<(), Failure> {
        let mut idle = 0;
        while !kernels.is_empty() {
            let index = self.below(kernels.len());
            match kernels[index].step(1 + self.below(1 << 16))? {
                Progress::Done => {
                    kernels.swap_remove(index);
                    idle = 0;
                }
                Progress::Moved => idle = 0,
                Progress::Waiting => idle += 1,
            }
            assert!(idle < 10_000, "stuck: {}", kernels[0].describe());
        }
        Ok(())
    }
}
