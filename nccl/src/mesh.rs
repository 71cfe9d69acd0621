//! The ranks of a job along named axes: pipeline, data, tensor and other parallel groups.

use nccl_base::error::{Error, ErrorKind, Result};
use nccl_core::Communicator;

/// The ranks of a job along named axes. The last axis varies fastest: under most launchers its neighbours are ranks of
/// one host, so tensor parallel comes last.
///
/// ```
/// use nccl::Mesh;
///
/// // Eight ranks: two pipeline stages, each with two replicas of a model that two ranks share.
/// let mesh = Mesh::new(5, 8, &[("pp", 2), ("dp", 2), ("tp", 2)])?;
/// assert_eq!((mesh.coordinate("pp"), mesh.coordinate("dp"), mesh.coordinate("tp")), (1, 0, 1));
/// assert_eq!(mesh.ranks(&["tp"]), [4, 5]);
/// assert_eq!(mesh.ranks(&["dp"]), [5, 7]);
/// assert_eq!(mesh.ranks(&["pp"]), [1, 5]);
/// // All that have the same stage.
/// assert_eq!(mesh.ranks(&["dp", "tp"]), [4, 5, 6, 7]);
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Name, length, and this rank's coordinate; the last axis varies fastest.
    axes: Vec<Axis>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Axis {
    name: String,
    length: usize,
    coordinate: usize,
}

impl Mesh {
    /// Arranges `world_size` ranks, as seen from `rank`. `axes` have names and lengths.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] when the lengths do not multiply to the number of ranks, `rank` is none of them, or two axes have
    /// the same name.
    ///
    /// ```
    /// let error = nccl::Mesh::new(0, 8, &[("dp", 3), ("tp", 2)]).unwrap_err();
    /// assert!(error.to_string().contains("dp 3 × tp 2 is 6, and there are 8 ranks"), "{error}");
    /// ```
    pub fn new(rank: usize, world_size: usize, axes: &[(&str, usize)]) -> Result<Self> {
        let invalid = |reason| {
            Error::new(ErrorKind::InvalidConfig {
                field: "mesh",
                reason,
            })
        };
        for (place, (name, _)) in axes.iter().enumerate() {
            if axes[..place].iter().any(|(other, _)| other == name) {
                return Err(invalid(format!("the axis {name:?} is there twice")));
            }
        }
        let product = axes
            .iter()
            .try_fold(1usize, |product, (_, length)| product.checked_mul(*length));
        if product != Some(world_size) || rank >= world_size {
            let axes: Vec<_> = axes
                .iter()
                .map(|(name, length)| format!("{name} {length}"))
                .collect();
            let product =
                product.map_or_else(|| String::from("too many"), |product| product.to_string());
            return Err(invalid(format!(
                "{} is {product}, and there are {world_size} ranks, of which this is {rank}",
                axes.join(" × ")
            )));
        }
        let mut rest = rank;
        let mut placed: Vec<Axis> = axes
            .iter()
            .rev()
            .map(|(name, length)| {
                let coordinate = rest % length;
                rest /= length;
                Axis {
                    name: (*name).to_owned(),
                    length: *length,
                    coordinate,
                }
            })
            .collect();
        placed.reverse();
        Ok(Self { axes: placed })
    }

    fn axis(&self, name: &str) -> &Axis {
        let found = self.axes.iter().find(|axis| axis.name == name);
        found.unwrap_or_else(|| {
            let names: Vec<_> = self.axes.iter().map(|axis| &axis.name).collect();
            panic!("the mesh has the axes {names:?}, and no {name:?}")
        })
    }

    /// Returns where this rank is along an axis, from 0.
    ///
    /// # Panics
    /// When there is no such axis.
    ///
    /// ```
    /// let mesh = nccl::Mesh::new(3, 4, &[("dp", 2), ("tp", 2)])?;
    /// assert_eq!(mesh.coordinate("dp"), 1);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn coordinate(&self, axis: &str) -> usize {
        self.axis(axis).coordinate
    }

    /// Returns the length of an axis.
    ///
    /// # Panics
    /// When there is no such axis.
    ///
    /// ```
    /// let mesh = nccl::Mesh::new(3, 8, &[("dp", 4), ("tp", 2)])?;
    /// assert_eq!(mesh.length("dp"), 4);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn length(&self, axis: &str) -> usize {
        self.axis(axis).length
    }

    /// Returns, in order, the ranks that differ from this rank only along `axes`, including this rank.
    ///
    /// # Panics
    /// When there is no such axis.
    ///
    /// ```
    /// let mesh = nccl::Mesh::new(3, 4, &[("dp", 2), ("tp", 2)])?;
    /// assert_eq!(mesh.ranks(&["tp"]), [2, 3]);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn ranks(&self, axes: &[&str]) -> Vec<usize> {
        for axis in axes {
            self.axis(axis);
        }
        let mut ranks = vec![0];
        for axis in &self.axes {
            let coordinates = match axes.contains(&&*axis.name) {
                true => 0..axis.length,
                false => axis.coordinate..axis.coordinate + 1,
            };
            ranks = ranks
                .into_iter()
                .flat_map(|rank| coordinates.clone().map(move |one| rank * axis.length + one))
                .collect();
        }
        ranks
    }

    /// Makes a communicator of [`ranks`](Self::ranks) by splitting `all`, a communicator of all ranks. Every rank of
    /// `all` has to call it, with the same axes.
    ///
    /// The communicator is named after `all` and the axes: `model/dp+tp`.
    ///
    /// # Errors
    /// As [`Communicator::split`]. [`ErrorKind::InvalidConfig`] when rank or size of `all` are not those of the mesh.
    ///
    /// # Panics
    /// When there is no such axis.
    ///
    /// ```
    /// # fn example(world: &nccl::World, stream: &std::sync::Arc<nccl::cudarc::driver::CudaStream>) -> nccl::Result<()> {
    /// let mesh = world.mesh(&[("pp", 2), ("dp", 2), ("tp", 2)])?;
    /// let all = world.communicator("model").stream(stream).build()?;
    /// let tensor_parallel = mesh.communicator(&all, &["tp"])?;
    /// let data_parallel = mesh.communicator(&all, &["dp"])?;
    /// assert_eq!(tensor_parallel.rank(), mesh.coordinate("tp"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn communicator(&self, all: &Communicator, axes: &[&str]) -> Result<Communicator> {
        let ranks = self.ranks(axes);
        let own = self.ranks(&[])[0];
        let size: usize = self.axes.iter().map(|axis| axis.length).product();
        if (all.rank(), all.world_size()) != (own, size) {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "mesh",
                reason: format!(
                    "it is of rank {own} of {size}, and {:?} is rank {} of {}",
                    all.name(),
                    all.rank(),
                    all.world_size()
                ),
            }));
        }
        let name = format!("{}/{}", all.name(), axes.join("+"));
        // Groups do not overlap, so the first rank of each identifies it. Rank numbers fit both types.
        let split = all.split(&name, Some(ranks[0] as u32), own as i64)?;
        Ok(split.unwrap_or_else(|| unreachable!("a rank with a color is in the split")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AXES: [(&str, usize); 3] = [("pp", 2), ("dp", 3), ("tp", 4)];

    #[test]
    fn groups_along_any_axes_cut_the_ranks_into_disjoint_sets() {
        let of = |rank| Mesh::new(rank, 24, &AXES).unwrap();
        for axes in [
            &["tp"][..],
            &["dp"],
            &["pp"],
            &["pp", "tp"],
            &["dp", "tp"],
            &["pp", "dp", "tp"],
            &[],
        ] {
            for rank in 0..24 {
                let group = of(rank).ranks(axes);
                assert!(group.is_sorted() && group.contains(&rank), "{group:?}");
                let length: usize = axes.iter().map(|axis| of(rank).length(axis)).product();
                assert_eq!(group.len(), length);
                for other in group.clone() {
                    assert_eq!(of(other).ranks(axes), group);
                }
            }
        }
        // The order in which the axes are named does not count.
        assert_eq!(of(7).ranks(&["tp", "dp"]), of(7).ranks(&["dp", "tp"]));
        assert_eq!(of(0).ranks(&["tp"]), [0, 1, 2, 3]);
    }

    #[test]
    fn what_fits_no_number_of_ranks_is_refused() {
        let refused = |rank, size, axes: &[(&str, usize)]| {
            Mesh::new(rank, size, axes).unwrap_err().to_string()
        };
        assert!(refused(0, 8, &[("a", 2), ("a", 4)]).contains("twice"));
        assert!(refused(8, 8, &[("a", 8)]).contains("this is 8"));
        assert!(refused(0, 8, &[("a", usize::MAX), ("b", 2)]).contains("too many"));
        assert!(refused(0, 0, &[("a", 0)]).contains("there are 0 ranks"));
    }

    #[test]
    #[should_panic = "and no \"ep\""]
    fn an_axis_that_is_not_there_is_a_mistake_of_the_program() {
        let _ = Mesh::new(0, 24, &AXES).unwrap().coordinate("ep");
    }
}
