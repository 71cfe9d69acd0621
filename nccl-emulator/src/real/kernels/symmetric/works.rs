//! The works of a launch, and the end of each channel's part.

use super::layout;

/// One collective of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Work {
    /// The argument of the operator: the bits of a factor.
    pub(super) argument: u64,
    /// The elements that each rank sends, or receives from each rank.
    pub(super) elements: u64,
    /// The window of the input; 0 if the address is in no window.
    pub(super) input_window: u64,
    pub(super) output_window: u64,
    /// Offsets in the windows, or addresses.
    pub(super) input: u64,
    pub(super) output: u64,
    /// The channels that share the work, tile by tile.
    pub(super) first_channel: u64,
    pub(super) channels: u64,
    /// The distance between the buffers of neighbouring ranks, in units of 4 GiB (2.27).
    pub(super) stride: u64,
}

/// The end of a channel's part of the works: the last work, and the fraction of it, in 65536ths minus one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) work: usize,
    pub(super) fraction: u64,
}

impl Work {
    pub(super) fn decode(fields: &layout::Work, bytes: &[u8]) -> Self {
        Self {
            argument: fields.argument.get(bytes),
            elements: fields.elements.get(bytes),
            input_window: fields.input_window.get(bytes),
            output_window: fields.output_window.get(bytes),
            input: fields.input_offset.get(bytes),
            output: fields.output_offset.get(bytes),
            first_channel: fields.first_channel.get(bytes),
            channels: fields.channels.get(bytes),
            stride: 0,
        }
    }

    /// Decodes the only work of a launch of 2.27.
    pub(super) fn old(fields: &layout::OldArguments, bytes: &[u8]) -> Self {
        Self {
            argument: fields.argument.get(bytes),
            elements: fields.elements.get(bytes),
            input_window: 0,
            output_window: 0,
            input: fields.input.get(bytes),
            output: fields.output.get(bytes),
            first_channel: 0,
            channels: 0,
            stride: fields.stride.get(bytes),
        }
    }
}
