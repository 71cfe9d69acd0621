//! The library's exported functions, entered through the [faults](crate::faults).
//!
//! Programs find a function by its symbol. The symbols of the loaded library, in this process's memory alone, are led to
//! trampolines: each saves the arguments, asks [`entered`], and then either goes on to NVIDIA's function with the arguments
//! as they were, or returns what it was told. NCCL's calls of itself were bound when it was loaded, and do not pass here.
//!
//! A call that a fault makes fail does not reach NVIDIA's function, which therefore cannot note what it would have noted:
//! - inside a group: the group fails. NCCL is made to note a failure (an operation without a communicator), so that the end
//!   of the group drops what is queued, and the end returns the fault's code in place of NCCL's;
//! - an operation on a non-blocking communicator: the code becomes the communicator's state;
//! - `ncclCommGetAsyncError`: the same, and the call succeeds;
//! - `ncclCommInitRankConfig` and `…Scalable` with `ncclUnhandledCudaError`: the thread is left inside a group, as NCCL
//!   leaves it when CUDA cannot tell the device.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nccl_sys::Api;

use super::calls::Calls;
use super::error::LoadError;
use super::image::Image;
use super::redirect::{Protection, protect};
use super::types::{LayoutError, Types};
use crate::faults;

/// They return text, and cannot fail.
const TEXTS: [&str; 2] = ["ncclGetErrorString", "ncclGetLastError"];
/// Passed in memory, so that it takes no register.
const IN_MEMORY: &str = "ncclUniqueId";
const COMMUNICATOR: &str = "ncclComm_t";
const RANKS: [&str; 2] = ["rank", "myrank"];
/// Of `ncclResult_t`.
const UNHANDLED_CUDA: c_int = 1;
const INTERNAL: c_int = 3;
/// The answer of [`entered`] that leads on to NVIDIA's function.
const GO_ON: c_int = -1;
/// The bytes of a trampoline.
const SLOT: usize = 80;

/// A function as it is entered.
struct Entry {
    name: &'static str,
    kind: Kind,
    /// Which argument is the communicator.
    communicator: Option<usize>,
    /// Which argument is the rank, of a call that makes one.
    rank: Option<usize>,
    /// NVIDIA's function.
    address: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    GroupStart,
    GroupEnd,
    Abort,
    AsyncError,
    /// An init that has a group of its own.
    Init,
    /// What is queued on a stream.
    Operation,
    Other,
}

impl Entry {
    /// `None` for a function that no fault can sit at.
    fn new(symbol: &str, address: usize) -> Option<Self> {
        let wanted = symbol.strip_prefix('p').unwrap_or(symbol);
        let name = *Api::NAMES.iter().find(|name| **name == wanted)?;
        if TEXTS.contains(&name) {
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
        })
    }
}

/// The trampolines of a library: by the address of the function in the library, where it is entered.
#[derive(Debug, Default)]
pub(super) struct Entries(BTreeMap<u64, usize>);

impl Entries {
    /// Where the function at `address` in the library is entered.
    pub(super) fn of(&self, address: u64) -> Option<*const c_void> {
        let entry = self.0.get(&address).copied();
        entry.map(ptr::with_exposed_provenance)
    }
}

/// What the hook needs of the library that is loaded; there is one in a process.
static LIBRARY: OnceLock<Library> = OnceLock::new();

struct Library {
    start: usize,
    all_reduce: usize,
    communicator: Option<Fields>,
}

/// Fields of `ncclComm`, in bytes.
struct Fields {
    rank: usize,
    /// A pointer to it: communicators that share resources share it.
    abort_flag: usize,
    state: usize,
    blocking: usize,
}

impl Fields {
    fn of(types: &Types) -> Result<Self, LayoutError> {
        let offset = |path| Ok(types.field("ncclComm", path)?.offset);
        Ok(Self {
            rank: offset("rank")?,
            abort_flag: offset("abortFlag")?,
            state: offset("asyncResult")?,
            blocking: offset("config.blocking")?,
        })
    }
}

/// Leads the library's symbols to trampolines. None of its functions has been handed out yet.
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
        return Ok(Entries::default());
    };
    // The names `nccl…` and `pnccl…` have one address.
    let mut functions = BTreeMap::new();
    for export in &calls.exports {
        let address = image.at(export.address).expose_provenance();
        if let Some(entry) = Entry::new(&export.name, address) {
            functions.entry(export.address).or_insert(entry);
        }
    }
    let area = map(path, functions.len() * SLOT)?;
    let mut bytes = Vec::with_capacity(area.len());
    let mut entries = BTreeMap::new();
    for (function, entry) in functions {
        entries.insert(function, area.start + bytes.len());
        // As long as the trampolines, which is for ever.
        write_trampoline(&mut bytes, Box::leak(Box::new(entry)));
    }
    let to = ptr::with_exposed_provenance_mut::<u8>(area.start);
    // SAFETY: the area was mapped writable for this many trampolines, and is not yet in use.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    protect(path, &area, "trampolines", Protection::Executable)?;
    let library = Library {
        start,
        all_reduce,
        communicator: Fields::of(types).ok(),
    };
    // Before a trampoline can be entered.
    let _ = LIBRARY.set(library);
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

/// Leads the symbols in memory to the trampolines.
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
        // Not one of another library.
        if symbol.section != 0
            && let Some(&entry) = entries.0.get(&symbol.value)
        {
            symbol.value = entry.wrapping_sub(image.base()) as u64;
        }
    }
    protect(path, &pages, WHAT, Protection::Constant)
}

const PAGE: usize = 4096;

/// The saved arguments of a call: the six of registers backwards, the address to return to, and those in memory.
#[derive(Clone, Copy)]
struct Arguments(*const usize);

impl Arguments {
    fn get(self, at: usize) -> usize {
        let slot = if at < 6 { 5 - at } else { at + 1 };
        // SAFETY: the trampoline has saved six registers; what lies above them is the caller's, who has passed as many
        // arguments as the function has.
        unsafe { *self.0.add(slot) }
    }
}

/// A communicator that a call is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Subject {
    /// The handle.
    communicator: usize,
    rank: c_int,
    /// Where its abort flag is.
    flag: usize,
}

impl Subject {
    fn of(communicator: usize, fields: &Fields) -> Self {
        let at = |offset: usize| ptr::with_exposed_provenance::<u8>(communicator + offset);
        // SAFETY: the caller's communicator, which lives while a call of it does; the fields lie where the library's debug
        // information says, and neither changes once the handle is out.
        let (rank, flag) = unsafe {
            (
                at(fields.rank).cast::<c_int>().read_volatile(),
                at(fields.abort_flag).cast::<usize>().read_volatile(),
            )
        };
        Self {
            communicator,
            rank,
            flag,
        }
    }

    /// Makes the code the communicator's state.
    fn set_state(self, code: c_int, fields: &Fields) {
        let at = ptr::with_exposed_provenance_mut::<c_int>(self.communicator + fields.state);
        // SAFETY: as in `of`; NCCL reads and writes this field atomically.
        unsafe { AtomicI32::from_ptr(at) }.store(code, Ordering::SeqCst);
    }

    fn is_blocking(self, fields: &Fields) -> bool {
        let at = ptr::with_exposed_provenance::<c_int>(self.communicator + fields.blocking);
        // SAFETY: as in `of`.
        unsafe { at.read_volatile() == 1 }
    }
}

/// A call that a fault may hold.
struct Held {
    subjects: Vec<Subject>,
    /// One of the communicators, or one that shares its flag, is being aborted.
    aborted: AtomicBool,
    /// One of the communicators itself is: by now it may be freed.
    gone: AtomicBool,
}

static HELD: Mutex<Vec<Arc<Held>>> = Mutex::new(Vec::new());

fn held() -> std::sync::MutexGuard<'static, Vec<Arc<Held>>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells the calls that are held.
fn note_abort(aborted: Subject) {
    for held in held().iter() {
        for subject in &held.subjects {
            if subject.flag == aborted.flag {
                held.aborted.store(true, Ordering::SeqCst);
            }
            if subject.communicator == aborted.communicator {
                held.gone.store(true, Ordering::SeqCst);
            }
        }
    }
}

/// The group of a thread.
#[derive(Default)]
struct Group {
    depth: usize,
    members: Vec<Subject>,
    /// The code that its end returns.
    failed: Option<c_int>,
}

thread_local! {
    static GROUP: RefCell<Group> = const {
        RefCell::new(Group { depth: 0, members: Vec::new(), failed: None })
    };
}

/// Answers a trampoline: [`GO_ON`], or the code that the call returns.
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
    let library = LIBRARY.get();
    let fields = library.and_then(|library| library.communicator.as_ref());
    let subject = || {
        let communicator = arguments.get(entry.communicator?);
        let fields = fields.filter(|_| communicator != 0)?;
        Some(Subject::of(communicator, fields))
    };
    if entry.kind == Kind::Abort
        && let Some(subject) = subject()
    {
        note_abort(subject);
    }
    let struck = match faults::any() {
        true => strike(entry, arguments, subject()),
        false => Ok(()),
    };
    GROUP.with_borrow_mut(|group| {
        let answer = match (struck, library) {
            (Err(Struck::Gone), _) => {
                *group = Group::default();
                return INTERNAL;
            }
            (Err(Struck::Failed(code)), Some(library)) => {
                fail(entry, code, subject(), library, group)
            }
            _ => GO_ON,
        };
        match entry.kind {
            Kind::GroupStart if answer == GO_ON => group.depth += 1,
            Kind::GroupEnd => return end(entry, arguments, answer, group),
            _ if group.depth > 0 && faults::any() => group.members.extend(subject()),
            _ => {}
        }
        answer
    })
}

/// What a fault makes of a call.
enum Struck {
    /// It fails.
    Failed(c_int),
    /// While it was held, its communicator was aborted: NVIDIA's function must not see it any more.
    Gone,
}

/// Lets the faults at the call strike.
fn strike(entry: &Entry, arguments: Arguments, subject: Option<Subject>) -> Result<(), Struck> {
    let subjects = match entry.kind {
        Kind::GroupEnd => GROUP.with_borrow(|group| group.members.clone()),
        _ => subject.into_iter().collect(),
    };
    let mut ranks: Vec<_> = subjects.iter().map(|subject| subject.rank).collect();
    if subjects.is_empty() {
        ranks.extend(entry.rank.map(|at| arguments.get(at) as c_int));
    }
    let call = Arc::new(Held {
        subjects,
        aborted: AtomicBool::new(false),
        gone: AtomicBool::new(false),
    });
    held().push(Arc::clone(&call));
    let struck =
        faults::check_call_until(entry.name, &ranks, &|| call.aborted.load(Ordering::SeqCst));
    held().retain(|other| !Arc::ptr_eq(other, &call));
    match struck {
        // Its own abort is what it waits for.
        _ if entry.kind != Kind::Abort && call.gone.load(Ordering::SeqCst) => Err(Struck::Gone),
        Ok(()) => Ok(()),
        Err(code) => Err(Struck::Failed(code.number() as c_int)),
    }
}

/// What a call that a fault makes fail leaves behind, and returns.
fn fail(
    entry: &Entry,
    code: c_int,
    subject: Option<Subject>,
    library: &Library,
    group: &mut Group,
) -> c_int {
    let fields = library.communicator.as_ref();
    match entry.kind {
        Kind::AsyncError => {
            if let (Some(subject), Some(fields)) = (subject, fields) {
                subject.set_state(code, fields);
            }
            return GO_ON;
        }
        Kind::Init if code == UNHANDLED_CUDA => {
            // SAFETY: `ncclGroupStart` of the loaded library, which has no arguments.
            unsafe { function::<extern "C" fn() -> c_int>(library.start)() };
            group.depth += 1;
        }
        Kind::Operation => {
            if let (Some(subject), Some(fields)) = (subject, fields)
                && !subject.is_blocking(fields)
            {
                subject.set_state(code, fields);
            }
        }
        _ => {}
    }
    if matches!(entry.kind, Kind::Operation | Kind::GroupEnd) && group.depth > 0 {
        group.failed.get_or_insert(code);
        type AllReduce = extern "C" fn(usize, usize, usize, c_int, c_int, usize, usize) -> c_int;
        // SAFETY: `ncclAllReduce` of the loaded library; without a communicator it only notes that the group has failed.
        unsafe { function::<AllReduce>(library.all_reduce)(0, 0, 0, 0, 0, 0, 0) };
    }
    code
}

/// The end of a group, of which the fault at the call has answered so much already.
fn end(entry: &Entry, arguments: Arguments, answer: c_int, group: &mut Group) -> c_int {
    group.depth = group.depth.saturating_sub(1);
    if group.depth > 0 {
        // The end of an inner group does nothing but count.
        return GO_ON;
    }
    group.members.clear();
    let Some(code) = group.failed.take() else {
        return answer;
    };
    type End = extern "C" fn(usize) -> c_int;
    // SAFETY: `ncclGroupEnd`, which takes nothing, or `ncclGroupSimulateEnd` with the pointer that it was called with.
    unsafe { function::<End>(entry.address)(arguments.get(0)) };
    code
}

/// The function at an address.
///
/// # Safety
/// There is a function of the type `F`.
unsafe fn function<F: Copy>(address: usize) -> F {
    let address: *const c_void = ptr::with_exposed_provenance(address);
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: the caller's promise; a function pointer and a data pointer are of one size here.
    unsafe { mem::transmute_copy(&address) }
}
