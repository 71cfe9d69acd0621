//! The works of a launch, and where each channel's part of them ends.

use super::layout;

/// One collective of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Work {
    /// Of the operator: the bits of a factor.
    pub(super) argument: u64,
    /// Elements that each rank sends, or receives of each.
    pub(super) elements: u64,
    /// 0 if the address is in no window.
    pub(super) input_window: u64,
    pub(super) output_window: u64,
    /// Offsets in the windows, or addresses.
    pub(super) input: u64,
    pub(super) output: u64,
    /// The channels that share the work tile by tile.
    pub(super) first_channel: u64,
    pub(super) channels: u64,
    /// How far the buffers of neighbouring ranks are from each other, in units of 4 GiB (2.27).
    pub(super) stride: u64,
}

/// Where a channel's part of the works ends: in which, and after how many 65536ths of it but one.
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

    /// The only work of a launch of 2.27.
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
