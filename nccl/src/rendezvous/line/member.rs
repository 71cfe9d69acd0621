//! Who a rank is: its host, its process, and where it listens.

/// What is known of a rank.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Where it listens, unless it is a thread of this process.
    pub(in crate::rendezvous) at: Option<String>,
}

impl Member {
    /// A thread of this process.
    pub(in crate::rendezvous) fn here() -> Self {
        Self {
            host: crate::host::name().to_string(),
            pid: std::process::id(),
            at: None,
        }
    }
}
