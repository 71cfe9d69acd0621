//! The buffers of one exchange.

use crate::all_to_all::schedule::Payload;
use crate::all_to_all::variable::Sides;
use crate::buffer::{RecvBuffer, SendBuffer};
use crate::collectives::same_type;
use crate::error::{Error, ErrorKind, Result};
use crate::issuing::IssueBuffers;

/// The maximum number of payloads in a plan.
pub(super) const MOST: usize = 4;

/// The start addresses of the buffers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Addresses {
    pub(super) send: [u64; MOST],
    pub(super) recv: [u64; MOST],
}

pub(crate) mod sealed {
    use super::{Addresses, IssueBuffers, Payload, Result};

    pub trait Lend<'a> {
        /// Checks the buffers against the plan's payloads, and takes them.
        #[allow(private_interfaces)]
        fn lend(self, payloads: &[Payload], buffers: &mut IssueBuffers<'a>) -> Result<Addresses>;
    }
}

/// The buffers of an exchange of several payloads: a tuple of pairs, each of a send and a receive buffer, in the order
/// of the plan's payloads; see [`AllToAll::enqueue_all`](crate::AllToAll::enqueue_all).
///
/// ```
/// use nccl::cudarc::driver::CudaSlice;
///
/// fn fits<'a, P: nccl::all_to_all::Payloads<'a>>() {}
/// fits::<((&CudaSlice<u8>, &mut CudaSlice<u8>), (&CudaSlice<f32>, &mut CudaSlice<f32>))>();
/// ```
pub trait Payloads<'a>: sealed::Lend<'a> {}

/// Takes the two buffers of payload `number`.
pub(super) fn lend_pair<'a, S: SendBuffer<'a>, R: RecvBuffer<'a>>(
    (x, y): (S, R),
    payload: &Payload,
    buffers: &mut IssueBuffers<'a>,
) -> Result<(u64, u64)> {
    let data_type = same_type(x.element(), y.element())?;
    check_type(payload, data_type)?;
    Sides::Send.holds(x.count(), payload.send_len())?;
    Sides::Recv.holds(y.count(), payload.recv_len())?;
    Ok((buffers.read(x)?, buffers.write(y)?))
}

/// Checks that a buffer has the type for which the plan was made.
pub(super) fn check_type(payload: &Payload, given: crate::DataType) -> Result<()> {
    match payload.data_type == given {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::InvalidConfig {
            field: "buffer",
            reason: format!(
                "it is of {given}, and the plan was made for {}",
                payload.data_type
            ),
        })),
    }
}

/// Checks that there are as many pairs of buffers as the plan has payloads.
pub(super) fn check_number(given: usize, payloads: &[Payload]) -> Result<()> {
    match given == payloads.len() {
        true => Ok(()),
        false => Err(crate::all_to_all::record::length(
            "the buffers",
            given,
            payloads.len(),
            "a pair for each payload of the plan",
        )),
    }
}

macro_rules! tuples {
    ($(($($send:ident $recv:ident $at:tt),*) $number:literal)*) => {
        $(
            impl<'a, $($send, $recv),*> sealed::Lend<'a> for ($(($send, $recv),)*)
            where
                $($send: SendBuffer<'a>, $recv: RecvBuffer<'a, Element = $send::Element>),*
            {
                #[allow(private_interfaces)]
                fn lend(self, payloads: &[Payload], buffers: &mut IssueBuffers<'a>) -> Result<Addresses> {
                    check_number($number, payloads)?;
                    let mut addresses = Addresses::default();
                    $(
                        let (send, recv) = lend_pair(self.$at, &payloads[$at], buffers)?;
                        (addresses.send[$at], addresses.recv[$at]) = (send, recv);
                    )*
                    Ok(addresses)
                }
            }

            impl<'a, $($send, $recv),*> Payloads<'a> for ($(($send, $recv),)*)
            where
                $($send: SendBuffer<'a>, $recv: RecvBuffer<'a, Element = $send::Element>),*
            {
            }
        )*
    };
}

tuples! {
    (S0 R0 0) 1
    (S0 R0 0, S1 R1 1) 2
    (S0 R0 0, S1 R1 1, S2 R2 2) 3
    (S0 R0 0, S1 R1 1, S2 R2 2, S3 R3 3) 4
}
