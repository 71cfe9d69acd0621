//! The GPUs that a program would see, without the driver, which would have to be initialised for it.

use std::ffi::OsString;

/// Returns the names of the visible GPUs, as `CUDA_VISIBLE_DEVICES` writes them; empty without GPUs.
///
/// # Errors
/// A sentence, if the variable is no text.
pub(crate) fn visible() -> Result<Vec<String>, String> {
    let named = std::env::var_os("CUDA_VISIBLE_DEVICES")
        .map(OsString::into_string)
        .transpose()
        .map_err(|value| {
            format!("CUDA_VISIBLE_DEVICES={value:?} is not UTF-8: set it to text, or unset it")
        })?;
    let there = std::fs::read_dir("/proc/driver/nvidia/gpus");
    Ok(listed(
        named.as_deref(),
        there.map_or(0, |entries| entries.flatten().count()),
    ))
}

fn listed(named: Option<&str>, there: usize) -> Vec<String> {
    match named {
        // Names behind the first invalid one do not count.
        Some(names) => names
            .split(',')
            .map(str::trim)
            .take_while(|name| !name.is_empty() && !name.starts_with('-'))
            .map(str::to_owned)
            .collect(),
        None => (0..there).map(|index| index.to_string()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::listed;

    #[test]
    fn what_cuda_is_told_to_see_counts() {
        assert_eq!(listed(None, 2), ["0", "1"]);
        assert_eq!(listed(Some("3, GPU-ab"), 8), ["3", "GPU-ab"]);
        assert_eq!(listed(Some("1,-1,2"), 8), ["1"]);
        assert!(listed(Some(""), 8).is_empty());
    }
}
