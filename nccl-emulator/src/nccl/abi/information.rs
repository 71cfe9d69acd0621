//! Functions without a communicator: version, texts, log and encryption.

use std::ffi::{c_char, c_int};

use nccl_sys::{NCCL_API_MAGIC, ncclComm_t, ncclEncryptionConfig_t, ncclResult_t};

use super::guard::{call, guarded};
use crate::code::{self, INVALID_ARGUMENT};
use crate::nccl::debug::{self, warn};
use crate::version;

pub(super) unsafe extern "C" fn ncclGetVersion(out: *mut c_int) -> ncclResult_t {
    call("ncclGetVersion", std::ptr::null_mut(), || {
        if out.is_null() {
            // The only error of this kind without a log line.
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { out.write(version::code()) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclGetErrorString(result: ncclResult_t) -> *const c_char {
    code::text(result).as_ptr()
}

pub(super) unsafe extern "C" fn ncclGetLastError(_: ncclComm_t) -> *const c_char {
    debug::last_error()
}

pub(super) unsafe extern "C" fn ncclResetDebugInit() {
    guarded("ncclResetDebugInit", || {
        debug::reset();
        Ok(())
    });
}

/// Only checks the argument: there is no TCP traffic to encrypt.
pub(super) unsafe extern "C" fn ncclSetEncryption(
    config: *const ncclEncryptionConfig_t,
) -> ncclResult_t {
    call("ncclSetEncryption", std::ptr::null_mut(), || {
        if config.is_null() {
            return Ok(());
        }
        // SAFETY: not null, and by the function's contract a config.
        let config = unsafe { config.read_unaligned() };
        if config.magic != NCCL_API_MAGIC {
            warn!(
                "ncclSetEncryption: config not initialized via NCCL_ENCRYPTION_CONFIG_INITIALIZER"
            );
            return Err(INVALID_ARGUMENT);
        }
        match config.mode {
            0 => Ok(()),
            1 if config.psk.is_null() => {
                warn!("ncclSetEncryption: NCCL_ENCRYPTION_MODE_PSK requires config->psk");
                Err(INVALID_ARGUMENT)
            }
            1 => {
                // SAFETY: not null, and by the function's contract a C string.
                let length = unsafe { libc::strlen(config.psk) };
                if length < 32 {
                    warn!("ncclSetEncryption: config->psk must be at least 32 bytes");
                    return Err(INVALID_ARGUMENT);
                }
                Ok(())
            }
            mode => {
                warn!("ncclSetEncryption: config->mode={mode} is not a supported encryption mode");
                Err(INVALID_ARGUMENT)
            }
        }
    })
}
