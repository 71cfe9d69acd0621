//! The collectives of a communicator, recorded in a group.

use super::Group;
use crate::buffer::{RecvBuffer, SendBuffer};
use crate::collectives::{Collective, rules};
#[cfg(doc)]
use crate::communicator::Communicator;
use crate::error::Result;
use crate::reduce::Reduction;

impl<'a> Group<'a> {
    /// Records [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1.0f32, 2.0])?;
    /// let mut y = stream.alloc_zeros::<f32>(2)?;
    /// comm.group(|group| group.all_reduce(&x, &mut y, nccl::ReduceOp::Sum))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce<S, R, O>(&mut self, x: S, y: R, op: O) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
        O: Reduction,
    {
        let collective =
            Collective::out_of_place(rules::ALL_REDUCE, Some(x), Some(y)).reducing(op, self.comm);
        self.add(collective)
    }

    /// Records [`Communicator::all_reduce_in_place`].
    ///
    /// # Errors
    /// As [`Communicator::all_reduce_in_place`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[1i64, 2])?;
    /// comm.group(|group| group.all_reduce_in_place(&mut y, nccl::ReduceOp::Min))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce_in_place<R, O>(&mut self, y: R, op: O) -> Result<()>
    where
        R: RecvBuffer<'a>,
        O: Reduction,
    {
        let collective = Collective::in_place(rules::ALL_REDUCE, y).reducing(op, self.comm);
        self.add(collective)
    }

    /// Records [`Communicator::broadcast`].
    ///
    /// # Errors
    /// As [`Communicator::broadcast`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1u8, 2])?;
    /// let mut y = stream.alloc_zeros::<u8>(2)?;
    /// comm.group(|group| group.broadcast((comm.rank() == 0).then_some(&x), &mut y, 0))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn broadcast<S, R>(&mut self, x: Option<S>, y: R, root: usize) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let collective = Ok(Collective::out_of_place(rules::BROADCAST, x, Some(y)).root(root));
        self.add(collective)
    }

    /// Records [`Communicator::broadcast_in_place`].
    ///
    /// # Errors
    /// As [`Communicator::broadcast_in_place`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[1u8, 2])?;
    /// comm.group(|group| group.broadcast_in_place(&mut y, 0))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn broadcast_in_place<R>(&mut self, y: R, root: usize) -> Result<()>
    where
        R: RecvBuffer<'a>,
    {
        let collective = Ok(Collective::in_place(rules::BROADCAST, y).root(root));
        self.add(collective)
    }

    /// Records [`Communicator::reduce`].
    ///
    /// # Errors
    /// As [`Communicator::reduce`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1i32, 2])?;
    /// let mut y = stream.alloc_zeros::<i32>(2)?;
    /// comm.group(|group| group.reduce(&x, (comm.rank() == 0).then_some(&mut y), nccl::ReduceOp::Prod, 0))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce<S, R, O>(&mut self, x: S, y: Option<R>, op: O, root: usize) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
        O: Reduction,
    {
        let collective = Collective::out_of_place(rules::REDUCE, Some(x), y)
            .root(root)
            .reducing(op, self.comm);
        self.add(collective)
    }

    /// Records [`Communicator::reduce_in_place`].
    ///
    /// # Errors
    /// As [`Communicator::reduce_in_place`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[1i32, 2])?;
    /// comm.group(|group| group.reduce_in_place(&mut y, nccl::ReduceOp::Sum, 0))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce_in_place<R, O>(&mut self, y: R, op: O, root: usize) -> Result<()>
    where
        R: RecvBuffer<'a>,
        O: Reduction,
    {
        let collective = Collective::in_place(rules::REDUCE, y)
            .root(root)
            .reducing(op, self.comm);
        self.add(collective)
    }

    /// Records [`Communicator::all_gather`].
    ///
    /// # Errors
    /// As [`Communicator::all_gather`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[7u64])?;
    /// let mut y = stream.alloc_zeros::<u64>(comm.world_size())?;
    /// comm.group(|group| group.all_gather(&x, &mut y))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_gather<S, R>(&mut self, x: S, y: R) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let collective = Ok(Collective::out_of_place(
            rules::ALL_GATHER,
            Some(x),
            Some(y),
        ));
        self.add(collective)
    }

    /// Records [`Communicator::all_gather_in_place`].
    ///
    /// # Errors
    /// As [`Communicator::all_gather_in_place`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[7u64])?;
    /// comm.group(|group| group.all_gather_in_place(&mut y))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_gather_in_place<R>(&mut self, y: R) -> Result<()>
    where
        R: RecvBuffer<'a>,
    {
        let collective = Ok(Collective::in_place(rules::ALL_GATHER, y));
        self.add(collective)
    }

    /// Records [`Communicator::reduce_scatter`].
    ///
    /// # Errors
    /// As [`Communicator::reduce_scatter`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&vec![1.5f64; comm.world_size()])?;
    /// let mut y = stream.alloc_zeros::<f64>(1)?;
    /// comm.group(|group| group.reduce_scatter(&x, &mut y, nccl::ReduceOp::Max))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce_scatter<S, R, O>(&mut self, x: S, y: R, op: O) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
        O: Reduction,
    {
        let collective = Collective::out_of_place(rules::REDUCE_SCATTER, Some(x), Some(y))
            .reducing(op, self.comm);
        self.add(collective)
    }

    /// Records [`Communicator::reduce_scatter_in_place`].
    ///
    /// # Errors
    /// As [`Communicator::reduce_scatter_in_place`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&vec![1.5f64; comm.world_size()])?;
    /// comm.group(|group| group.reduce_scatter_in_place(&mut y, nccl::ReduceOp::Sum))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reduce_scatter_in_place<R, O>(&mut self, y: R, op: O) -> Result<()>
    where
        R: RecvBuffer<'a>,
        O: Reduction,
    {
        let collective = Collective::in_place(rules::REDUCE_SCATTER, y).reducing(op, self.comm);
        self.add(collective)
    }

    /// Records [`Communicator::gather`].
    ///
    /// # Errors
    /// As [`Communicator::gather`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[7i8, 8])?;
    /// let mut y = stream.alloc_zeros::<i8>(2 * comm.world_size())?;
    /// comm.group(|group| group.gather(&x, (comm.rank() == 0).then_some(&mut y), 0))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn gather<S, R>(&mut self, x: S, y: Option<R>, root: usize) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let collective = Ok(Collective::out_of_place(rules::GATHER, Some(x), y).root(root));
        self.add(collective)
    }

    /// Records [`Communicator::gather_in_place`].
    ///
    /// # Errors
    /// As [`Communicator::gather_in_place`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[7i8, 8])?;
    /// comm.group(|group| group.gather_in_place(&mut y, 0))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn gather_in_place<R>(&mut self, y: R, root: usize) -> Result<()>
    where
        R: RecvBuffer<'a>,
    {
        let collective = Ok(Collective::in_place(rules::GATHER, y).root(root));
        self.add(collective)
    }

    /// Records [`Communicator::scatter`].
    ///
    /// # Errors
    /// As [`Communicator::scatter`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&vec![3u32; comm.world_size()])?;
    /// let mut y = stream.alloc_zeros::<u32>(1)?;
    /// comm.group(|group| group.scatter((comm.rank() == 0).then_some(&x), &mut y, 0))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn scatter<S, R>(&mut self, x: Option<S>, y: R, root: usize) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let collective = Ok(Collective::out_of_place(rules::SCATTER, x, Some(y)).root(root));
        self.add(collective)
    }

    /// Records [`Communicator::scatter_in_place`].
    ///
    /// # Errors
    /// As [`Communicator::scatter_in_place`]; after an error nothing is recorded.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[3u32])?;
    /// comm.group(|group| group.scatter_in_place(&mut y, 0))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn scatter_in_place<R>(&mut self, y: R, root: usize) -> Result<()>
    where
        R: RecvBuffer<'a>,
    {
        let collective = Ok(Collective::in_place(rules::SCATTER, y).root(root));
        self.add(collective)
    }
}
