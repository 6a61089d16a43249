#include "fullshard/core/storage_owner.h"

#include <utility>

namespace fullshard::internal {
namespace {

void release_owner(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<StorageOwner*>(context));
}

struct KeyAccess : c10::TensorImpl {
  static c10::DispatchKeySet c10::TensorImpl::*field() {
    return &KeyAccess::key_set_;
  }
};

}  // namespace

StorageOwner* storage_owner(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.unsafeGetTensorImpl()
                                 ->unsafe_storage()
                                 .unsafeGetStorageImpl()
                                 ->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &release_owner) return nullptr;
  return static_cast<StorageOwner*>(data.get_context());
}

c10::DataPtr owned_data_ptr(void* data, StorageOwner& owner,
                            c10::Device device) {
  c10::raw::intrusive_ptr::incref(&owner);
  return c10::DataPtr(data, &owner, &release_owner, device);
}

c10::Storage make_owned_storage(size_t num_bytes, StorageOwner& owner,
                                c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), num_bytes,
                      owned_data_ptr(nullptr, owner, device));
}

void make_throwing(const c10::Storage& storage, std::string message) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr data = impl->set_data_ptr(c10::DataPtr(nullptr, impl->device()));
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::move(message));
  // The call above drops the DataPtr and with it the owner: name it again.
  impl->set_data_ptr_noswap(std::move(data));
}

void set_touch_key(const at::Tensor& tensor, bool on) {
  c10::DispatchKeySet& keys =
      tensor.unsafeGetTensorImpl()->*KeyAccess::field();
  keys = on ? keys.add(kTouchKey) : keys.remove(kTouchKey);
}

void point_at(const at::Tensor& tensor, const c10::Storage& storage,
              bool touch_key) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  // Results of detach() and tensor_data() forbid it by default.
  impl->set_allow_tensor_metadata_change(true);
  impl->set_storage_keep_dtype(storage);
  set_touch_key(tensor, touch_key);
}

}  // namespace fullshard::internal
