//! Tests beside the simulator: the wire format, and the events for drivers while a generation forms.

mod codec;
mod forming;
mod links;
