// A device of type CUDA for a torch that was built without: one device, one stream, nothing ever runs. Owns what torch
// asks of a device below Python (guard, hooks, pinned memory); tests/pretended/tensor.py owns tensors and what is
// computed. Compiled at first use (build.py) and loaded before torch, which looks for hooks once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>

namespace pretended {

constexpr auto kType = c10::DeviceType::CUDA;

c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, 0)); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return {kType, 0}; }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// Pinned host memory: of the CPU's allocator, and remembered.
struct Pinned final : at::HostAllocator {
  static Pinned& get() {
    static auto* pinned = new Pinned();  // outlives every tensor
    return *pinned;
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    auto* address = memory.get();
    auto* context = memory.release_context();
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[static_cast<char*>(address)] = bytes;
    return {address, context, &Pinned::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Pinned::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool holds(const void* pointer) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* wanted = static_cast<char*>(const_cast<void*>(pointer));
    auto next = blocks_.upper_bound(wanted);
    if (next == blocks_.begin()) return false;
    auto [start, bytes] = *std::prev(next);
    return wanted < start + bytes;
  }

 private:
  static void free(void* context) {
    {
      std::lock_guard<std::mutex> lock(get().mutex_);
      get().blocks_.erase(static_cast<char*>(context));  // the CPU's allocator: context and address are one
    }
    c10::GetCPUAllocator()->raw_deleter()(context);
  }
  mutable std::mutex mutex_;
  std::map<char*, size_t> blocks_;
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex current_device() const override { return 0; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return Pinned::get().holds(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &Pinned::get(); }
  void deviceSynchronize(at::DeviceIndex) const override {}
  at::Generator getNewGenerator(at::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

const c10::impl::DeviceGuardImplRegistrar guard(kType, new Guard());
const at::HostAllocatorRegistry<kType> host_allocator(&Pinned::get());

}  // namespace pretended

namespace at {
using pretended::CUDAHooks;  // torch looks for this name
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
