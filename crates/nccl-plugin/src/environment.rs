//! The environment that NCCL reads.
//!
//! From 2.28.7 NCCL reads its variables through a plugin. This plugin gives NCCL the values that this process has
//! [`set`] and, for every other variable, the process's environment. It replaces `setenv`, which no program with
//! several threads can call safely.
//!
//! Where both have a value, the exported variable takes precedence, and [`set`] returns the contradiction.
//!
//! The values belong to the process and not to a communicator: NCCL reads most variables once. A second value for a
//! variable is refused, and every libnccl of the process reads the same values. Variables that NCCL reads before it has
//! the plugin (`NCCL_DEBUG`, `NCCL_DEBUG_FILE`, `NCCL_CONF_FILE`, `NCCL_ENV_PLUGIN`) cannot be set here.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use nccl_sys::Version;

use crate::offer::{Offer, offer};

/// A variable of NCCL that can be set for this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variable {
    /// `NCCL_SOCKET_IFNAME`: the interfaces of NCCL's own sockets.
    SocketInterface,
    /// `NCCL_SOCKET_FAMILY`: `AF_INET` or `AF_INET6`.
    SocketFamily,
    /// `NCCL_RAS_ADDR`: where NCCL's RAS thread listens for clients.
    RasAddress,
    /// `NCCL_SOCKET_RETRY_CNT`: how often NCCL's sockets retry a connection.
    SocketRetries,
    /// `NCCL_SOCKET_RETRY_SLEEP_MSEC`: the pause before the first of these retries.
    SocketRetryPause,
    /// `NCCL_IB_TIMEOUT`: the exponent of the time in which an InfiniBand packet has to be acknowledged.
    InfinibandTimeout,
    /// `NCCL_IB_RETRY_CNT`: how often a packet is sent again.
    InfinibandRetries,
}

impl Variable {
    /// All variables that can be set.
    pub const ALL: [Self; 7] = [
        Self::SocketInterface,
        Self::SocketFamily,
        Self::RasAddress,
        Self::SocketRetries,
        Self::SocketRetryPause,
        Self::InfinibandTimeout,
        Self::InfinibandRetries,
    ];

    /// Returns the variable that NCCL knows by this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|one| one.entry().name.to_bytes() == name.as_bytes())
    }

    fn entry(self) -> &'static Entry {
        &ENTRIES[self as usize]
    }
}

impl fmt::Display for Variable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.entry().name.to_string_lossy())
    }
}

/// One variable. NCCL reads it on any thread, so there is no lock.
struct Entry {
    name: &'static CStr,
    /// Written once, never freed: NCCL may keep the pointer.
    value: AtomicPtr<c_char>,
    /// Whether NCCL has read it.
    was_read: AtomicBool,
    /// Whether NCCL was given the value.
    was_given: AtomicBool,
    /// Whether NCCL was given an exported value that differs from the one set here.
    is_overridden: AtomicBool,
}

impl Entry {
    const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            value: AtomicPtr::new(null_mut()),
            was_read: AtomicBool::new(false),
            was_given: AtomicBool::new(false),
            is_overridden: AtomicBool::new(false),
        }
    }

    fn value(&self) -> Option<&'static CStr> {
        let value = self.value.load(Ordering::SeqCst);
        // SAFETY: null, or a C string that `set` leaked.
        (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
    }

    fn was_read_without_value(&self) -> bool {
        self.was_read.load(Ordering::SeqCst) && !self.was_given.load(Ordering::SeqCst)
    }

    /// Returns the value to give to NCCL, which may be none.
    fn give(&self) -> *const c_char {
        let value = self.value.load(Ordering::SeqCst);
        if !value.is_null() {
            self.was_given.store(true, Ordering::SeqCst);
        }
        value
    }
}

/// In the order of [`Variable`].
static ENTRIES: [Entry; 7] = [
    Entry::new(c"NCCL_SOCKET_IFNAME"),
    Entry::new(c"NCCL_SOCKET_FAMILY"),
    Entry::new(c"NCCL_RAS_ADDR"),
    Entry::new(c"NCCL_SOCKET_RETRY_CNT"),
    Entry::new(c"NCCL_SOCKET_RETRY_SLEEP_MSEC"),
    Entry::new(c"NCCL_IB_TIMEOUT"),
    Entry::new(c"NCCL_IB_RETRY_CNT"),
];

/// Why NCCL does not read the given value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The environment of the process has another value, which takes precedence.
    Exported(String),
    /// This process has already set another value.
    SetBefore(String),
    /// NCCL has read the variable already.
    ReadBefore,
    /// The value contains a zero byte, which is not possible in a variable.
    ZeroByte,
}

/// Sets the value that NCCL reads for a variable, for the rest of the process. The same value may be set again.
///
/// # Errors
/// [`Refusal`]: NCCL reads, or has read, another value.
pub fn set(variable: Variable, value: &str) -> Result<(), Refusal> {
    let entry = variable.entry();
    if let Some(exported) = std::env::var_os(variable.to_string()) {
        return match exported.to_str() == Some(value) {
            true => Ok(()),
            false => Err(Refusal::Exported(exported.display().to_string())),
        };
    }
    let text = CString::new(value).map_err(|_| Refusal::ZeroByte)?;
    if entry.was_read_without_value() {
        return Err(Refusal::ReadBefore);
    }
    let new = text.into_raw();
    let before = entry
        .value
        .compare_exchange(null_mut(), new, Ordering::SeqCst, Ordering::SeqCst);
    if before.is_err() {
        // SAFETY: the pointer comes from `into_raw` above, and was not stored.
        drop(unsafe { CString::from_raw(new) });
    } else if entry.was_read_without_value() {
        // NCCL has read the variable between the two checks.
        return Err(Refusal::ReadBefore);
    }
    match entry.value() {
        Some(held) if held.to_bytes() == value.as_bytes() => Ok(()),
        held => Err(Refusal::SetBefore(
            held.unwrap_or_default().to_string_lossy().into_owned(),
        )),
    }
}

/// Returns the value that was [`set`].
#[must_use]
pub fn get(variable: Variable) -> Option<String> {
    let value = variable.entry().value()?;
    Some(value.to_string_lossy().into_owned())
}

/// Returns whether NCCL has read the variable through the plugin, and was given the value that was [`set`].
#[must_use]
pub fn is_in_effect(variable: Variable) -> bool {
    let entry = variable.entry();
    entry.was_given.load(Ordering::SeqCst) && !entry.is_overridden.load(Ordering::SeqCst)
}

/// Offers the plugin to NCCL. To be called before libnccl is loaded; later calls return what the first returned.
pub fn install() -> &'static Offer {
    static OFFER: OnceLock<Offer> = OnceLock::new();
    OFFER.get_or_init(|| {
        let symbols = [
            (c"ncclEnvPlugin_v2", (&raw const TABLE_V2).cast::<c_void>()),
            (c"ncclEnvPlugin_v1", (&raw const TABLE_V1).cast::<c_void>()),
        ];
        offer("NCCL_ENV_PLUGIN", c"libnccl-env.so", &symbols)
    })
}

/// The release of the library that took the plugin, as `ncclGetVersion` gives it; 0 until one has.
static TAKEN_BY: AtomicU32 = AtomicU32::new(0);

/// Returns the release of the libnccl that has taken the plugin.
#[must_use]
pub fn taken_by() -> Option<Version> {
    match TAKEN_BY.load(Ordering::SeqCst) {
        0 => None,
        packed => {
            let [_, major, minor, patch] = packed.to_be_bytes();
            Some(Version::new(major.into(), minor.into(), patch.into()))
        }
    }
}

/// `ncclEnv_v1_t`.
#[repr(C)]
struct TableV1 {
    name: *const c_char,
    init: unsafe extern "C" fn(u8, u8, u8, *const c_char) -> c_int,
    finalize: extern "C" fn() -> c_int,
    get_env: unsafe extern "C" fn(*const c_char) -> *const c_char,
}

/// `ncclEnv_v2_t`: `init` has NCCL's log function as well.
#[repr(C)]
struct TableV2 {
    name: *const c_char,
    init: unsafe extern "C" fn(u8, u8, u8, *const c_char, *const c_void) -> c_int,
    finalize: extern "C" fn() -> c_int,
    get_env: unsafe extern "C" fn(*const c_char) -> *const c_char,
}

// SAFETY: constants.
unsafe impl Sync for TableV1 {}
// SAFETY: as above.
unsafe impl Sync for TableV2 {}

const NAME: *const c_char = c"nccl-rs".as_ptr();

static TABLE_V1: TableV1 = TableV1 {
    name: NAME,
    init: init_v1,
    finalize,
    get_env,
};

static TABLE_V2: TableV2 = TableV2 {
    name: NAME,
    init: init_v2,
    finalize,
    get_env,
};

const SUCCESS: c_int = 0;

fn take(major: u8, minor: u8, patch: u8) -> c_int {
    // A release is never 0.0.0.
    let packed = u32::from_be_bytes([0, major, minor, patch]);
    TAKEN_BY.store(packed, Ordering::SeqCst);
    SUCCESS
}

unsafe extern "C" fn init_v1(major: u8, minor: u8, patch: u8, _suffix: *const c_char) -> c_int {
    take(major, minor, patch)
}

unsafe extern "C" fn init_v2(
    major: u8,
    minor: u8,
    patch: u8,
    _suffix: *const c_char,
    _log: *const c_void,
) -> c_int {
    take(major, minor, patch)
}

/// Called by NCCL from an exit handler. Values stay: another libnccl may read them.
extern "C" fn finalize() -> c_int {
    SUCCESS
}

/// Neither locks, allocates nor panics, because NCCL calls it on any thread, and while the process exits.
unsafe extern "C" fn get_env(name: *const c_char) -> *const c_char {
    if name.is_null() {
        return null_mut();
    }
    // SAFETY: NCCL passes a C string, for which it would call `getenv` itself.
    let (exported, name) = unsafe { (libc::getenv(name), CStr::from_ptr(name)) };
    let Some(entry) = ENTRIES.iter().find(|entry| entry.name == name) else {
        return exported;
    };
    if exported.is_null() {
        // Before `was_read`, so that a `set` at this time does not find a reading without a value; and after it, so that a `set`
        // from now on finds this reading.
        let _ = entry.give();
        entry.was_read.store(true, Ordering::SeqCst);
        return entry.give();
    }
    entry.was_read.store(true, Ordering::SeqCst);
    // `set` looks at the environment, too; this one may come from NCCL's configuration file, which NCCL exports.
    entry
        .is_overridden
        .store(entry.value().is_some(), Ordering::SeqCst);
    exported
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Finds the plugin in the same way as NCCL.
    fn table() -> &'static TableV2 {
        assert_eq!(*install(), Offer::Made);
        // SAFETY: the stand-in has this name and symbol.
        unsafe {
            let handle = libc::dlopen(c"libnccl-env.so".as_ptr(), libc::RTLD_NOW);
            assert!(!handle.is_null());
            let table = libc::dlsym(handle, c"ncclEnvPlugin_v2".as_ptr());
            &*table.cast::<TableV2>()
        }
    }

    fn read(table: &TableV2, name: &CStr) -> Option<String> {
        // SAFETY: as NCCL calls it.
        let value = unsafe { (table.get_env)(name.as_ptr()) };
        if value.is_null() {
            return None;
        }
        // SAFETY: a C string.
        let value = unsafe { CStr::from_ptr(value) };
        Some(value.to_string_lossy().into_owned())
    }

    #[test]
    fn nccl_reads_what_was_set_once_and_the_environment_for_all_else() {
        let table = table();
        assert_eq!(taken_by(), None);
        // SAFETY: as NCCL calls it.
        let code = unsafe { (table.init)(2, 32, 3, c"+cuda13.0".as_ptr(), std::ptr::null()) };
        assert_eq!(code, SUCCESS);
        assert_eq!(taken_by(), Some(Version::new(2, 32, 3)));
        assert_eq!(read(table, c"PATH"), std::env::var("PATH").ok());
        assert_eq!(read(table, c"NCCL_NO_SUCH_VARIABLE"), None);

        set(Variable::SocketInterface, "=eth1").unwrap();
        set(Variable::SocketInterface, "=eth1").unwrap();
        assert!(!is_in_effect(Variable::SocketInterface));
        let refused = set(Variable::SocketInterface, "=ib0").unwrap_err();
        assert_eq!(refused, Refusal::SetBefore("=eth1".into()));
        assert_eq!(read(table, c"NCCL_SOCKET_IFNAME").unwrap(), "=eth1");
        assert!(is_in_effect(Variable::SocketInterface));
        set(Variable::SocketInterface, "=eth1").unwrap();

        assert_eq!(read(table, c"NCCL_SOCKET_FAMILY"), None);
        let refused = set(Variable::SocketFamily, "AF_INET").unwrap_err();
        assert_eq!(refused, Refusal::ReadBefore);
        assert_eq!(read(table, c"NCCL_SOCKET_FAMILY"), None);
        // A `set` that checked before NCCL read the variable, and stored its value after.
        let late = c"AF_INET".as_ptr().cast_mut();
        let entry = Variable::SocketFamily.entry();
        entry.value.store(late, Ordering::SeqCst);
        assert!(!is_in_effect(Variable::SocketFamily));
        let refused = set(Variable::SocketFamily, "AF_INET").unwrap_err();
        assert_eq!(refused, Refusal::ReadBefore);
        assert_eq!(read(table, c"NCCL_SOCKET_FAMILY").unwrap(), "AF_INET");
        assert!(is_in_effect(Variable::SocketFamily));
        set(Variable::SocketFamily, "AF_INET").unwrap();
        assert_eq!(
            set(Variable::RasAddress, "a\0b").unwrap_err(),
            Refusal::ZeroByte
        );
    }

    #[test]
    fn variables_have_the_names_of_their_entries() {
        for variable in Variable::ALL {
            assert_eq!(Variable::named(&variable.to_string()), Some(variable));
        }
        assert_eq!(Variable::SocketInterface.to_string(), "NCCL_SOCKET_IFNAME");
        assert_eq!(Variable::RasAddress.to_string(), "NCCL_RAS_ADDR");
    }
}
