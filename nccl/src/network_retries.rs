//! How often NCCL retries on its network before it reports an error: typed values of variables that NCCL reads.

use std::time::Duration;

use nccl_base::error::{Error, ErrorKind, Result};
use nccl_core::Library;
use nccl_plugin::environment::{self, Refusal, Variable};

use crate::nccl_environment;

/// How often NCCL retries on its network before it reports an error, in this process. Fields that are `None` leave
/// NCCL's value unchanged.
///
/// NCCL waits about a minute for a host that refuses connections, and seconds for an InfiniBand packet that is not
/// acknowledged. A server that restarts ranks itself needs less; a network that is rerouted may need more.
///
/// ```
/// use std::time::Duration;
/// use nccl::process::NetworkRetries;
///
/// // 0.1 + 0.2 + … + 1.0 s, and then an error.
/// let retries = NetworkRetries::default().with(|retries| {
///     retries.sockets = Some(10);
///     retries.socket_pause = Some(Duration::from_millis(100));
/// });
/// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
/// retries.apply()?;
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetworkRetries {
    /// How often NCCL's sockets retry a connection (`NCCL_SOCKET_RETRY_CNT`; NCCL's default is 34).
    pub sockets: Option<u32>,
    /// The pause before the first of these retries, in whole milliseconds; the second waits twice as long, the third
    /// three times, and so on (`NCCL_SOCKET_RETRY_SLEEP_MSEC`; 100 ms).
    pub socket_pause: Option<Duration>,
    /// How long an InfiniBand packet waits for its acknowledgement: the exponent `t` of 4.096 µs × 2^t, from 1 to 31
    /// (`NCCL_IB_TIMEOUT`; 20, which is 4.3 s).
    pub infiniband_timeout: Option<u8>,
    /// How often an InfiniBand packet is sent again, from 0 to 7 (`NCCL_IB_RETRY_CNT`; 7).
    pub infiniband: Option<u8>,
}

const FIELD: &str = "network_retries";

/// Maximum of `socket_pause`: with it, the thirty-fourth pause takes more than half an hour.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Maximum of `sockets`.
const MOST_RETRIES: u32 = 10_000;

impl NetworkRetries {
    /// Sets fields in a chain of calls.
    ///
    /// ```
    /// let retries = nccl::process::NetworkRetries::default().with(|retries| retries.infiniband = Some(3));
    /// ```
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Sets the values that NCCL reads, for the rest of the process. To be called before the first communicator; may be
    /// called again with the same values.
    ///
    /// An exported variable takes precedence, with a warning in the log (`nccl.environment.contradicted`).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for a value out of range, when this process has already set another value or NCCL
    /// has already read the variable, and where NCCL does not read its environment from this process
    /// (`docs/nccl-environment.md`). [`ErrorKind::Unsupported`] before NCCL 2.28.7. When one variable cannot be set,
    /// the fields before it, in the order above, stay set.
    ///
    /// ```
    /// use nccl::process::NetworkRetries;
    ///
    /// let retries = NetworkRetries::default().with(|retries| retries.infiniband = Some(8));
    /// let error = retries.apply().unwrap_err();
    /// assert!(error.to_string().contains("infiniband is 8, and can be 0 to 7"));
    /// ```
    pub fn apply(self) -> Result<()> {
        let values = self.values()?;
        nccl_environment::install();
        nccl_environment::is_read().map_err(|why| invalid(why.to_owned()))?;
        // Without a library, the first communicator returns the error.
        if let Ok(library) = Library::load()
            && library.version() < nccl_environment::SINCE
        {
            return Err(Error::from(ErrorKind::Unsupported {
                what: String::from("setting the retries of its network"),
                needs: nccl_environment::SINCE,
                found: library.version(),
                path: library.path().to_owned(),
            }));
        }
        for (variable, value) in values {
            match environment::set(variable, &value) {
                Ok(()) => {}
                Err(Refusal::Exported(exported)) => tracing::warn!(
                    name: "nccl.environment.contradicted",
                    target: "nccl",
                    variable = %variable,
                    exported,
                    value,
                    "NCCL uses the exported value, and not that of `NetworkRetries`: unset the variable, or export the same"
                ),
                Err(Refusal::SetBefore(before)) => {
                    return Err(invalid(format!(
                        "NCCL of this process has {variable}={before} already, and reads it once: {value} needs another process"
                    )));
                }
                Err(Refusal::ReadBefore | Refusal::ZeroByte) => {
                    return Err(invalid(format!(
                        "NCCL has read {variable} already: apply it before the first communicator"
                    )));
                }
            }
        }
        Ok(())
    }

    fn values(self) -> Result<Vec<(Variable, String)>> {
        let Self {
            sockets,
            socket_pause,
            infiniband_timeout,
            infiniband,
        } = self;
        if let Some(retries) = sockets.filter(|retries| *retries > MOST_RETRIES) {
            let why = format!("sockets is {retries}, and can be 0 to {MOST_RETRIES}");
            return Err(invalid(why));
        }
        let in_range = |pause: &Duration| {
            *pause <= LONGEST_PAUSE && pause.as_nanos().is_multiple_of(1_000_000)
        };
        if let Some(pause) = socket_pause.filter(|pause| !in_range(pause)) {
            let why = format!(
                "socket_pause is {pause:?}, and can be whole milliseconds up to {LONGEST_PAUSE:?}"
            );
            return Err(invalid(why));
        }
        // NCCL treats 0 as no timeout.
        if let Some(exponent) = infiniband_timeout.filter(|one| !(1..=31).contains(one)) {
            let why = format!("infiniband_timeout is {exponent}, and can be 1 to 31");
            return Err(invalid(why));
        }
        if let Some(retries) = infiniband.filter(|retries| *retries > 7) {
            return Err(invalid(format!(
                "infiniband is {retries}, and can be 0 to 7"
            )));
        }
        let values = [
            (Variable::SocketRetries, sockets.map(u128::from)),
            (
                Variable::SocketRetryPause,
                socket_pause.map(|pause| pause.as_millis()),
            ),
            (
                Variable::InfinibandTimeout,
                infiniband_timeout.map(u128::from),
            ),
            (Variable::InfinibandRetries, infiniband.map(u128::from)),
        ];
        let set =
            |(variable, value): (Variable, Option<u128>)| Some((variable, value?.to_string()));
        Ok(values.into_iter().filter_map(set).collect())
    }
}

fn invalid(reason: String) -> Error {
    Error::from(ErrorKind::InvalidConfig {
        field: FIELD,
        reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(set: impl FnOnce(&mut NetworkRetries)) -> std::result::Result<String, String> {
        let values = NetworkRetries::default().with(set).values();
        let text = |(variable, value): (Variable, String)| format!("{variable}={value}");
        let values = values.map(|values| values.into_iter().map(text).collect::<Vec<_>>());
        values
            .map(|values| values.join(" "))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn fields_become_variables_and_only_those_that_are_set() {
        assert_eq!(values(|_| {}).unwrap(), "");
        let all = values(|retries| {
            retries.sockets = Some(3);
            retries.socket_pause = Some(Duration::from_millis(20));
            retries.infiniband_timeout = Some(18);
            retries.infiniband = Some(0);
        });
        let expected = "NCCL_SOCKET_RETRY_CNT=3 NCCL_SOCKET_RETRY_SLEEP_MSEC=20 NCCL_IB_TIMEOUT=18 NCCL_IB_RETRY_CNT=0";
        assert_eq!(all.unwrap(), expected);
    }

    #[test]
    fn what_nccl_would_misread_is_refused() {
        let refused = |set: fn(&mut NetworkRetries)| values(set).unwrap_err();
        assert!(refused(|one| one.infiniband_timeout = Some(0)).contains("1 to 31"));
        assert!(refused(|one| one.infiniband_timeout = Some(32)).contains("1 to 31"));
        assert!(refused(|one| one.infiniband = Some(8)).contains("0 to 7"));
        assert!(refused(|one| one.sockets = Some(u32::MAX)).contains("0 to 10000"));
        let pause = |one: &mut NetworkRetries| one.socket_pause = Some(Duration::from_micros(1500));
        assert!(refused(pause).contains("1.5ms, and can be whole milliseconds"));
    }
}
