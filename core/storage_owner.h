#ifndef FULLSHARD_CORE_STORAGE_OWNER_H_
#define FULLSHARD_CORE_STORAGE_OWNER_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "c10/core/DispatchKey.h"
#include "c10/core/Storage.h"
#include "c10/util/intrusive_ptr.h"

namespace fullshard::internal {

// The key that tensors of sharded storage carry. Operators that receive one
// enter the fallback in sharding/touch.cc. DeferredInit is free for
// out-of-tree use.
inline constexpr c10::DispatchKey kTouchKey = c10::DispatchKey::DeferredInit;

// Owns the two storages between which a paged parameter moves: one that holds
// no memory and throws on access, and one that is pointed at unsharded memory
// while that exists.
//
// [Note: Identity by storage]
// Parameters, their views and their aliases are different TensorImpls over the
// same StorageImpl, so the StorageImpl's DataPtr names the owner: its deleter
// is our function and its context is the owner, of which the DataPtr holds one
// reference. No map, no lock, and a graph may outlive the model.
class StorageOwner : public c10::intrusive_ptr_target {
 public:
  // Makes the unsharded memory present and current for this thread's next
  // operator. Errors: c10::Error if the owner's model is gone or a collective
  // fails.
  virtual void touch() = 0;

  virtual const c10::Storage& sharded_storage() const = 0;
  virtual const c10::Storage& slot_storage() const = 0;

  // Changes whenever the values behind the storages change.
  virtual uint64_t generation() const = 0;

  // The unit's name, for messages.
  virtual const std::string& name() const = 0;
};

// Returns the owner of `tensor`'s storage, or null for an ordinary tensor.
StorageOwner* storage_owner(const at::Tensor& tensor);

// Returns a DataPtr to `data` (may be null) that names `owner`.
c10::DataPtr owned_data_ptr(void* data, StorageOwner& owner,
                            c10::Device device);

// Returns a storage of `num_bytes` without memory that names `owner`.
c10::Storage make_owned_storage(size_t num_bytes, StorageOwner& owner,
                                c10::Device device);

// Makes every access to the data of `storage` throw `message`; its owner stays
// known. Cannot be undone.
void make_throwing(const c10::Storage& storage, std::string message);

// Points `tensor` at `storage`, with or without the touch key. Sizes, strides,
// offset and version counter stay.
void point_at(const at::Tensor& tensor, const c10::Storage& storage,
              bool touch_key);

void set_touch_key(const at::Tensor& tensor, bool on);
inline bool has_touch_key(const at::Tensor& tensor) {
  return tensor.key_set().has(kTouchKey);
}

}  // namespace fullshard::internal

#endif  // FULLSHARD_CORE_STORAGE_OWNER_H_
