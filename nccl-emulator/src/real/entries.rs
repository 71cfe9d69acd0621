//! NVIDIA's exported functions, with [faults](crate::faults) injected before them.
//!
//! A program looks a function up by its symbol. In this process's copy of the library, the symbols point to trampolines: each
//! saves the arguments, calls [`entered`], and then either jumps to NVIDIA's function with the arguments unchanged or returns
//! the code of [`entered`]. NCCL's calls of its own functions do not use the symbols.
//!
//! A call that a fault fails does not reach NVIDIA's function. This module reproduces the side effects that a failure of that
//! function has:
//! - inside a group: the group fails. A call of an operation without a communicator makes NCCL record a failure, so that the
//!   end of the group drops the queued work, and returns the fault's code in place of NCCL's;
//! - an operation on a non-blocking communicator: the code becomes the communicator's state;
//! - `ncclCommGetAsyncError`: the same, and the call succeeds;
//! - `ncclCommInitRankConfig` and `…Scalable` with `ncclUnhandledCudaError`: the thread stays inside a group, as NCCL leaves it
//!   when CUDA cannot determine the device.
//!
//! A call that is held while its own communicator is aborted returns `ncclInternalError`, and NVIDIA's function does not see
//! the communicator again. An abort waits for a call that stalls. It does not wait for one that hangs or is delayed: if that
//! call belongs to a group with operations of the communicator, the group can no longer be ended, and its thread gets
//! `ncclInternalError` from every later call on a communicator.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

use cuda_emulator::sync::{Condvar, Mutex, MutexGuard};
use nccl_sys::Api;

use super::calls::Calls;
use super::error::LoadError;
use super::image::Image;
use super::redirect::{Protection, protect};
use super::types::{LayoutError, Types};
use crate::faults;

/// Functions that return no code, but texts, teams and numbers.
const WITHOUT_CODE: [&str; 10] = [
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclLLA2ACalcSlots",
    "ncclTeamCft",
    "ncclTeamCftMultimem",
    "ncclTeamLsa",
    "ncclTeamRail",
    "ncclTeamRankToLsa",
    "ncclTeamRankToWorld",
    "ncclTeamWorld",
];
/// A type that is passed in memory, so it takes no register.
const IN_MEMORY: &str = "ncclUniqueId";
const COMMUNICATOR: &str = "ncclComm_t";
const RANKS: [&str; 2] = ["rank", "myrank"];
/// Functions that queue nothing in a group.
const QUERIES: [&str; 3] = ["ncclCommCount", "ncclCommCuDevice", "ncclCommUserRank"];
/// The number of `ncclUnhandledCudaError`.
const UNHANDLED_CUDA: c_int = 1;
const INTERNAL: c_int = 3;
/// The answer of [`entered`] that continues with NVIDIA's function.
const GO_ON: c_int = -1;
/// The bytes of a trampoline.
const SLOT: usize = 80;

/// A function with a trampoline.
struct Entry {
    name: &'static str,
    kind: Kind,
    /// The index of the communicator among the arguments.
    communicator: Option<usize>,
    /// The index of the rank among the arguments, for calls that create a communicator.
    rank: Option<usize>,
    /// The address of NVIDIA's function.
    address: usize,
    library: &'static Library,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    GroupStart,
    GroupEnd,
    Abort,
    Destroy,
    AsyncError,
    /// An init that has a group of its own.
    Init,
    /// An operation queued on a stream.
    Operation,
    Other,
}

impl Entry {
    /// Returns `None` for a function without fault injection.
    fn new(symbol: &str, address: usize, library: &'static Library) -> Option<Self> {
        let wanted = symbol.strip_prefix('p').unwrap_or(symbol);
        let name = *Api::NAMES.iter().find(|name| **name == wanted)?;
        if WITHOUT_CODE.contains(&name) {
            return None;
        }
        let arguments: Vec<_> = Api::arguments(name)?
            .iter()
            .filter(|(_, kind)| *kind != IN_MEMORY)
            .collect();
        let is_queued = arguments.iter().any(|(_, kind)| *kind == "cudaStream_t");
        let kind = match name {
            "ncclGroupStart" => Kind::GroupStart,
            "ncclGroupEnd" | "ncclGroupSimulateEnd" => Kind::GroupEnd,
            "ncclCommAbort" => Kind::Abort,
            "ncclCommDestroy" => Kind::Destroy,
            "ncclCommGetAsyncError" => Kind::AsyncError,
            "ncclCommInitRankConfig" | "ncclCommInitRankScalable" => Kind::Init,
            _ if is_queued => Kind::Operation,
            _ => Kind::Other,
        };
        let position = |is: &dyn Fn(&str, &str) -> bool| {
            arguments.iter().position(|(name, kind)| is(name, kind))
        };
        Some(Self {
            name,
            kind,
            communicator: position(&|_, kind| kind == COMMUNICATOR),
            rank: position(&|name, _| RANKS.contains(&name)),
            address,
            library,
        })
    }
}

/// The trampolines of a library, by the address of the function in the library.
#[derive(Debug, Default)]
pub(super) struct Entries(BTreeMap<u64, usize>);

impl Entries {
    /// Returns the trampoline of the function at `address` in the library.
    pub(super) fn of(&self, address: u64) -> Option<*const c_void> {
        let entry = self.0.get(&address).copied();
        entry.map(ptr::with_exposed_provenance)
    }
}

/// The data of a library that the hook needs.
struct Library {
    start: usize,
    all_reduce: usize,
    fields: Fields,
}

/// Offsets of fields of `ncclComm`, in bytes.
struct Fields {
    rank: usize,
    ranks: usize,
    /// A pointer to the flag: communicators that share resources share one flag.
    abort_flag: usize,
    /// The flag of the children that do not share it; an abort raises it as well.
    child_abort_flag: usize,
    state: usize,
    blocking: usize,
}

impl Fields {
    fn of(types: &Types) -> Result<Self, LayoutError> {
        let offset = |path| Ok(types.field("ncclComm", path)?.offset);
        Ok(Self {
            rank: offset("rank")?,
            ranks: offset("nRanks")?,
            abort_flag: offset("abortFlag")?,
            child_abort_flag: offset("childAbortFlag")?,
            state: offset("asyncResult")?,
            blocking: offset("config.blocking")?,
        })
    }
}

/// Redirects the library's symbols to trampolines. Called before any of its functions is handed out.
pub(super) fn redirect(
    path: &Path,
    image: &Image,
    calls: &Calls,
    types: &Types,
) -> Result<Entries, LoadError> {
    let address = |name: &str| {
        let export = calls.exports.iter().find(|export| export.name == name);
        export.map(|export| image.at(export.address).expose_provenance())
    };
    let (Some(start), Some(all_reduce)) = (address("ncclGroupStart"), address("ncclAllReduce"))
    else {
        // A library without operations, as in tests.
        return Ok(Entries::default());
    };
    // Lives as long as the trampolines, for the rest of the process.
    let library = Box::leak(Box::new(Library {
        start,
        all_reduce,
        fields: Fields::of(types)?,
    }));
    // The names `nccl…` and `pnccl…` have the same address.
    let mut functions = BTreeMap::new();
    for export in &calls.exports {
        let address = image.at(export.address).expose_provenance();
        if let Some(entry) = Entry::new(&export.name, address, library) {
            functions.entry(export.address).or_insert(entry);
        }
    }
    let area = map(path, functions.len() * SLOT)?;
    let mut bytes = Vec::with_capacity(area.len());
    let mut entries = BTreeMap::new();
    for (function, entry) in functions {
        entries.insert(function, area.start + bytes.len());
        write_trampoline(&mut bytes, Box::leak(Box::new(entry)));
    }
    let to = ptr::with_exposed_provenance_mut::<u8>(area.start);
    // SAFETY: the area was mapped writable for this many trampolines, and is not yet in use.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    protect(path, &area, "trampolines", Protection::Executable)?;
    let entries = Entries(entries);
    write_symbols(path, image, calls, &entries)?;
    Ok(entries)
}

fn map(path: &Path, bytes: usize) -> Result<Range<usize>, LoadError> {
    let length = bytes.next_multiple_of(PAGE);
    // SAFETY: new memory, at an address that the system chooses.
    let mapped = unsafe {
        libc::mmap(
            ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return Err(LoadError::Protect {
            path: path.to_owned(),
            what: "memory for trampolines",
            protection: "writable",
            source: io::Error::last_os_error(),
        });
    }
    let start = mapped.expose_provenance();
    Ok(start..start + length)
}

fn write_trampoline(bytes: &mut Vec<u8>, entry: &'static Entry) {
    let hook: extern "C" fn(&Entry, *const usize) -> c_int = entered;
    let start = bytes.len();
    // push rdi, rsi, rdx, rcx, r8, r9; sub rsp, 8
    bytes.extend([0x57, 0x56, 0x52, 0x51, 0x41, 0x50, 0x41, 0x51]);
    bytes.extend([0x48, 0x83, 0xec, 0x08]);
    // mov rdi, entry; lea rsi, [rsp + 8]
    bytes.extend([0x48, 0xbf]);
    bytes.extend((ptr::from_ref(entry).expose_provenance() as u64).to_le_bytes());
    bytes.extend([0x48, 0x8d, 0x74, 0x24, 0x08]);
    // mov rax, hook; call rax
    bytes.extend([0x48, 0xb8]);
    bytes.extend((hook as usize as u64).to_le_bytes());
    bytes.extend([0xff, 0xd0]);
    // add rsp, 8; pop r9, r8, rcx, rdx, rsi, rdi
    bytes.extend([0x48, 0x83, 0xc4, 0x08]);
    bytes.extend([0x41, 0x59, 0x41, 0x58, 0x59, 0x5a, 0x5e, 0x5f]);
    // test eax, eax; js over the next; ret; jmp [rip]
    bytes.extend([0x85, 0xc0, 0x78, 0x01, 0xc3, 0xff, 0x25, 0, 0, 0, 0]);
    bytes.extend((entry.address as u64).to_le_bytes());
    // int3
    bytes.resize(start + SLOT, 0xcc);
}

/// An entry of a dynamic symbol table.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

/// Writes the addresses of the trampolines to the symbols in memory.
fn write_symbols(
    path: &Path,
    image: &Image,
    calls: &Calls,
    entries: &Entries,
) -> Result<(), LoadError> {
    const WHAT: &str = "the table of symbols";
    let table = image.at(calls.symbols.start);
    let bytes = (calls.symbols.end - calls.symbols.start) as usize;
    let start = table.expose_provenance();
    let pages = start / PAGE * PAGE..(start + bytes).next_multiple_of(PAGE);
    protect(path, &pages, WHAT, Protection::Writable)?;
    for at in 0..bytes / size_of::<Symbol>() {
        // SAFETY: the table of the loaded library has this many symbols, as its file says; the pages were made writable, and no
        // other thread looks for symbols in a library that this one has just loaded for itself.
        let symbol = unsafe { &mut *table.cast::<Symbol>().add(at) };
        // Skips symbols of other libraries.
        if symbol.section != 0
            && let Some(&entry) = entries.0.get(&symbol.value)
        {
            symbol.value = entry.wrapping_sub(image.base()) as u64;
        }
    }
    protect(path, &pages, WHAT, Protection::Constant)
}

const PAGE: usize = 4096;

/// The saved arguments of a call: the six in registers in reverse order, the return address, and the arguments in memory.
#[derive(Clone, Copy)]
struct Arguments(*const usize);

impl Arguments {
    fn get(self, at: usize) -> usize {
        let slot = if at < 6 { 5 - at } else { at + 1 };
        // SAFETY: the trampoline has saved six registers; above them lies the stack of the caller, with as many arguments as
        // the function has.
        unsafe { *self.0.add(slot) }
    }
}

/// A communicator that a call concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Subject {
    /// The handle.
    communicator: usize,
    /// `None` before a non-blocking init has begun.
    rank: Option<c_int>,
    /// The addresses of its abort flag, and of its children's; 0 for none.
    flag: usize,
    child_flag: usize,
}

impl Subject {
    fn of(communicator: usize, fields: &Fields) -> Self {
        let at = |offset: usize| ptr::with_exposed_provenance::<u8>(communicator + offset);
        // SAFETY: the communicator of a call lives while NVIDIA's function has not been entered, and the fields lie where the
        // library's debug information says. An init that is under way sets each of them once: the rank before the number of
        // ranks, which is 0 until then. The flag of the children changes in calls that exclude this one.
        unsafe {
            let ranks = at(fields.ranks).cast::<c_int>().read_volatile();
            let rank = at(fields.rank).cast::<c_int>().read_volatile();
            Self {
                communicator,
                rank: (ranks > 0).then_some(rank),
                flag: at(fields.abort_flag).cast::<usize>().read_volatile(),
                child_flag: at(fields.child_abort_flag).cast::<usize>().read_volatile(),
            }
        }
    }

    /// Sets the communicator's state to the code, unless the communicator is blocking.
    fn set_state(self, code: c_int, fields: &Fields) {
        let at = |offset| ptr::with_exposed_provenance_mut::<c_int>(self.communicator + offset);
        // SAFETY: as in `of`; NCCL reads and writes the state atomically.
        unsafe {
            if at(fields.blocking).read_volatile() != 1 {
                AtomicI32::from_ptr(at(fields.state)).store(code, Ordering::SeqCst);
            }
        }
    }
}

/// A call that a fault may hold.
struct Call {
    subjects: Vec<Subject>,
    /// One of the communicators, or one that shares its flag, is being aborted.
    aborted: AtomicBool,
    /// One of the communicators itself is being freed.
    is_ended: AtomicBool,
    /// The call that frees it waits for this one.
    is_awaited: AtomicBool,
    /// A fault holds it until an abort.
    stalls: AtomicBool,
}

impl Call {
    /// Whether one of its communicators is aborted.
    fn is_aborted(&self) -> bool {
        // A call that frees a communicator announces it under this lock, before it does so.
        let _calls = calls();
        self.stalls.store(true, Ordering::SeqCst);
        let is_raised = |subject: &Subject| {
            let flag = ptr::with_exposed_provenance_mut::<u32>(subject.flag);
            // SAFETY: the flag lives as long as the communicator, which is not freed; NCCL writes it atomically.
            subject.flag != 0 && unsafe { AtomicU32::from_ptr(flag) }.load(Ordering::SeqCst) != 0
        };
        self.aborted.load(Ordering::SeqCst)
            || (!self.is_ended.load(Ordering::SeqCst) && self.subjects.iter().any(is_raised))
    }
}

/// The calls that faults may hold.
static CALLS: Mutex<Vec<Arc<Call>>> = Mutex::new(Vec::new());
static LEFT: Condvar = Condvar::new();
/// The longest wait of an abort for a stalled call. Such a call notices the abort within milliseconds, unless something else
/// delays it.
const LEAVING: Duration = Duration::from_secs(10);

fn calls() -> MutexGuard<'static, Vec<Arc<Call>>> {
    CALLS.lock()
}

/// Keeps a call among [`CALLS`] until it is dropped.
struct UnderWay(Arc<Call>);

impl UnderWay {
    fn new(subjects: Vec<Subject>) -> Self {
        let call = Arc::new(Call {
            subjects,
            aborted: AtomicBool::new(false),
            is_ended: AtomicBool::new(false),
            is_awaited: AtomicBool::new(false),
            stalls: AtomicBool::new(false),
        });
        calls().push(Arc::clone(&call));
        Self(call)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        calls().retain(|call| !Arc::ptr_eq(call, &self.0));
        LEFT.notify_all();
    }
}

/// Tells the held calls that a communicator is about to be freed, and waits for those that end with its abort.
fn note_end(ended: Subject, is_abort: bool) {
    let mut calls = calls();
    for call in calls.iter() {
        for subject in &call.subjects {
            let is_it = subject.communicator == ended.communicator;
            if is_it {
                // A call that first checks for the abort after this point is not waited for.
                let is_awaited = is_abort && call.stalls.load(Ordering::SeqCst);
                call.is_awaited.store(is_awaited, Ordering::SeqCst);
                call.is_ended.store(true, Ordering::SeqCst);
            }
            let shares =
                subject.flag != 0 && [ended.flag, ended.child_flag].contains(&subject.flag);
            if is_abort && (is_it || shares) {
                call.aborted.store(true, Ordering::SeqCst);
            }
        }
    }
    if is_abort {
        let of_it = |call: &Arc<Call>| {
            let own = |subject: &Subject| subject.communicator == ended.communicator;
            call.subjects.iter().any(own) && call.is_awaited.load(Ordering::SeqCst)
        };
        LEFT.wait_while_for(&mut calls, |calls| calls.iter().any(of_it), LEAVING);
        for call in calls.iter().filter(|call| of_it(call)) {
            call.is_awaited.store(false, Ordering::SeqCst);
        }
    }
}

/// The group of a thread.
#[derive(Default)]
struct Group {
    depth: usize,
    /// The communicators of its operations, and the ranks of its inits.
    members: Vec<Subject>,
    ranks: Vec<c_int>,
    /// The code that its end returns.
    failed: Option<c_int>,
    /// NVIDIA's group contains operations of a freed communicator.
    is_lost: bool,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Answers a trampoline: returns [`GO_ON`], or the code that the call returns.
extern "C" fn entered(entry: &Entry, arguments: *const usize) -> c_int {
    let answered = catch_unwind(AssertUnwindSafe(|| enter(entry, Arguments(arguments))));
    answered.unwrap_or_else(|_| {
        eprintln!(
            "nccl-emulator: a fault at {} panicked: this is a bug of the emulator",
            entry.name
        );
        INTERNAL
    })
}

fn enter(entry: &Entry, arguments: Arguments) -> c_int {
    let frees = matches!(entry.kind, Kind::Abort | Kind::Destroy);
    let subject = || {
        let communicator = arguments.get(entry.communicator?);
        (communicator != 0).then(|| Subject::of(communicator, &entry.library.fields))
    };
    let any = faults::any();
    let subject = match any || (frees && !calls().is_empty()) {
        true => subject(),
        false => None,
    };
    let answer = GROUP.try_with(|group| match any {
        true => struck(entry, arguments, subject, group),
        false => answer(entry, arguments, None, None, &mut group.borrow_mut()),
    });
    // The group of an ending thread no longer exists.
    let answer = answer.unwrap_or(GO_ON);
    if answer == GO_ON
        && frees
        && let Some(subject) = subject
    {
        note_end(subject, entry.kind == Kind::Abort);
    }
    answer
}

/// The effect of a fault on a call.
enum Struck {
    /// The call fails.
    Failed(c_int),
    /// One of its communicators ended while the call was held, and may be freed.
    Ended { is_freed: bool },
}

/// Applies the faults of the call.
fn struck(
    entry: &Entry,
    arguments: Arguments,
    subject: Option<Subject>,
    group: &RefCell<Group>,
) -> c_int {
    let (subjects, mut ranks) = match entry.kind {
        Kind::GroupEnd => {
            let group = group.borrow();
            (group.members.clone(), group.ranks.clone())
        }
        _ => {
            let rank = entry.rank.filter(|_| subject.is_none());
            let rank = rank.map(|at| arguments.get(at) as c_int);
            (Vec::from_iter(subject), Vec::from_iter(rank))
        }
    };
    ranks.extend(subjects.iter().filter_map(|subject| subject.rank));
    // Kept until NVIDIA's group has been told.
    let under_way = UnderWay::new(subjects);
    let call = &under_way.0;
    let subjects = ranks
        .into_iter()
        .map(|rank| faults::Subject { rank, name: None });
    let subjects: Vec<_> = subjects.collect();
    let struck = faults::check_call(entry.name, &subjects, &|| call.is_aborted());
    let struck = match struck {
        _ if call.is_ended.load(Ordering::SeqCst) => Some(Struck::Ended {
            is_freed: !call.is_awaited.load(Ordering::SeqCst),
        }),
        Ok(()) => None,
        Err(code) => Some(Struck::Failed(code.number() as c_int)),
    };
    answer(entry, arguments, subject, struck, &mut group.borrow_mut())
}

fn answer(
    entry: &Entry,
    arguments: Arguments,
    subject: Option<Subject>,
    struck: Option<Struck>,
    group: &mut Group,
) -> c_int {
    let asks = entry.kind == Kind::AsyncError || QUERIES.contains(&entry.name);
    let queues = matches!(entry.kind, Kind::GroupStart | Kind::GroupEnd)
        || entry.communicator.is_some()
        || entry.rank.is_some();
    if group.is_lost && queues && !asks {
        return INTERNAL;
    }
    let answer = match struck {
        Some(Struck::Failed(code)) => fail(entry, code, subject, group),
        Some(Struck::Ended { is_freed }) => {
            let is_last = entry.kind == Kind::GroupEnd && group.depth == 1;
            let has_it = match (entry.kind, subject) {
                (Kind::GroupEnd, _) => true,
                (_, Some(subject)) => group
                    .members
                    .iter()
                    .any(|member| member.communicator == subject.communicator),
                (_, None) => false,
            };
            if has_it && (is_freed || !is_last) {
                group.is_lost = true;
                return INTERNAL;
            }
            fail_group(entry, INTERNAL, group);
            INTERNAL
        }
        None => GO_ON,
    };
    match entry.kind {
        Kind::GroupStart if answer == GO_ON => group.depth += 1,
        Kind::GroupEnd => return end(entry, arguments, answer, group),
        Kind::Operation if group.depth > 0 && answer == GO_ON => group.members.extend(subject),
        _ if group.depth > 0 && answer == GO_ON && subject.is_none() => {
            let rank = entry.rank.map(|at| arguments.get(at) as c_int);
            group.ranks.extend(rank);
        }
        _ => {}
    }
    answer
}

/// Reproduces the side effects of a failed call, and returns its code.
fn fail(entry: &Entry, code: c_int, subject: Option<Subject>, group: &mut Group) -> c_int {
    let library = entry.library;
    match entry.kind {
        Kind::AsyncError => {
            if let Some(subject) = subject {
                subject.set_state(code, &library.fields);
            }
            return GO_ON;
        }
        Kind::Init if code == UNHANDLED_CUDA => {
            // SAFETY: `ncclGroupStart` of the loaded library, which has no arguments.
            unsafe { function::<extern "C" fn() -> c_int>(library.start)() };
            group.depth += 1;
        }
        Kind::Operation => {
            if let Some(subject) = subject {
                subject.set_state(code, &library.fields);
            }
        }
        _ => {}
    }
    fail_group(entry, code, group);
    code
}

/// Fails NVIDIA's group, if the call belongs to one.
fn fail_group(entry: &Entry, code: c_int, group: &mut Group) {
    if matches!(entry.kind, Kind::Operation | Kind::GroupEnd) && group.depth > 0 {
        // NCCL's group end also returns the last code.
        group.failed = Some(code);
        type AllReduce = extern "C" fn(usize, usize, usize, c_int, c_int, usize, usize) -> c_int;
        // SAFETY: `ncclAllReduce` of the loaded library; without a communicator it only notes that the group has failed.
        unsafe { function::<AllReduce>(entry.library.all_reduce)(0, 0, 0, 0, 0, 0, 0) };
    }
}

/// Ends a group; `answer` is the result of a fault at this call.
fn end(entry: &Entry, arguments: Arguments, answer: c_int, group: &mut Group) -> c_int {
    group.depth = group.depth.saturating_sub(1);
    let (members, code) = if group.depth > 0 {
        (Vec::new(), (answer != GO_ON).then_some(answer))
    } else {
        let Group {
            members, failed, ..
        } = mem::take(group);
        (members, failed)
    };
    let Some(code) = code else {
        return answer;
    };
    type End = extern "C" fn(usize) -> c_int;
    // SAFETY: `ncclGroupEnd`, which takes nothing, or `ncclGroupSimulateEnd` with the pointer that it was called with.
    unsafe { function::<End>(entry.address)(arguments.get(0)) };
    // NCCL has set the state to the code of the operation without a communicator.
    for member in members {
        member.set_state(code, &entry.library.fields);
    }
    code
}

/// Returns the function at an address.
///
/// # Safety
/// There is a function of the type `F` at `address`.
unsafe fn function<F: Copy>(address: usize) -> F {
    let address: *const c_void = ptr::with_exposed_provenance(address);
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: the caller's promise; a function pointer and a data pointer are of one size here.
    unsafe { mem::transmute_copy(&address) }
}
