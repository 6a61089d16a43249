#ifndef FULLSHARD_CORE_DEVICE_H_
#define FULLSHARD_CORE_DEVICE_H_

#include <utility>

#include "c10/core/Device.h"
#include "c10/core/Stream.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace fullshard {

// A queue of work on a device, through LibTorch's device registry, so that one
// code serves CUDA and CPU. On CPU work runs at once and everything is a no-op.
class Stream {
 public:
  // Returns the stream that this thread's operators run on.
  static Stream current(c10::Device device) {
    return Stream(implementation(device).getStream(device));
  }
  // Returns a stream of the device's pool; on CPU, which has one, the current.
  static Stream create(c10::Device device, bool high_priority = false) {
    if (device.is_cpu()) return current(device);
    return Stream(
        implementation(device).getStreamFromGlobalPool(device, high_priority));
  }

  c10::Device device() const { return stream_.device(); }
  c10::Stream get() const { return stream_; }

  // Blocks the host until all work issued so far is done.
  void synchronize() const {
    if (!device().is_cpu()) {
      implementation(device()).synchronizeStream(stream_);
    }
  }

 private:
  explicit Stream(c10::Stream stream) : stream_(stream) {}
  static c10::impl::VirtualGuardImpl implementation(c10::Device device) {
    return c10::impl::VirtualGuardImpl(device.type());
  }

  c10::Stream stream_;
};

// Makes `stream` current for this thread's operators while it lives.
class StreamScope {
 public:
  explicit StreamScope(const Stream& stream) : guard_(stream.get()) {}

 private:
  c10::StreamGuard guard_;
};

// A point in a stream that other streams and the host can wait for. An event
// that was never recorded has happened.
class Event {
 public:
  explicit Event(c10::Device device) : device_(device) {}
  Event(Event&& other) noexcept
      : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(event_, other.event_);
    return *this;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (event_ != nullptr) {
      implementation().destroyEvent(event_, device_.index());
    }
  }

  // Marks the end of what `stream` has been given so far.
  void record(const Stream& stream) {
    if (device_.is_cpu()) return;
    implementation().record(&event_, stream.get(), device_.index(),
                            c10::EventFlag::PYTORCH_DEFAULT);
  }
  // Lets later work on `stream` start only after the event; does not block the
  // host.
  void wait(const Stream& stream) const {
    if (event_ != nullptr) implementation().block(event_, stream.get());
  }
  // Blocks the host until the event has happened.
  void synchronize() const {
    if (event_ != nullptr) implementation().synchronizeEvent(event_);
  }
  bool happened() const {
    return event_ == nullptr || implementation().queryEvent(event_);
  }

 private:
  c10::impl::VirtualGuardImpl implementation() const {
    return c10::impl::VirtualGuardImpl(device_.type());
  }

  c10::Device device_;
  void* event_ = nullptr;
};

}  // namespace fullshard

#endif  // FULLSHARD_CORE_DEVICE_H_
