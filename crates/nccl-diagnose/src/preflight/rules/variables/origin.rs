//! How findings name a variable.

use nccl_base::system::variables::Variable;

/// `NCCL_ALGO=Ring (from /etc/nccl.conf)`.
pub(super) fn with_origin(variable: &Variable) -> String {
    format!(
        "{}={} (from {})",
        variable.name,
        variable.value,
        variable.origin()
    )
}
