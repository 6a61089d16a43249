#ifndef FULLSHARD_IO_PT_WRITER_H_
#define FULLSHARD_IO_PT_WRITER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/io/atomic_file.h"
#include "fullshard/io/file_system.h"
#include "fullshard/io/pickle_writer.h"
#include "fullshard/io/pickled_tensor.h"
#include "fullshard/io/zip_writer.h"

namespace fullshard {

using PtScalar =
    std::variant<std::monostate, bool, int64_t, double, std::string>;

struct PtWriterOptions {
  // Write a storage once when it comes again, as torch.save does for tied
  // tensors. Then no storage may change until commit(). Switch it off where
  // tensors pass through a buffer that is used again.
  bool share_storages = true;
  // The outermost dict is an OrderedDict.
  bool ordered_root = false;
  FileSystem* file_system = nullptr;  // null: FileSystem::posix()
};

// Writes a `.pt` file that torch.load(path, weights_only=True) opens: a dict of
// tensors, scalars and dicts. Streams: the bytes of a tensor are on their way
// to the disk when tensor() returns, and the writer keeps only their place. The
// file appears under its name in commit(), whole and durable; without commit()
// nothing appears.
//
// Contiguous CPU tensors are not copied. A view is saved without the rest of
// its storage; a transposed dense tensor keeps its strides. requires_grad is
// not kept.
// Errors: those of the file; InvalidArgument for a key that appears twice or is
// not UTF-8, for end_dict() without begin_dict(), for tensors that are not
// dense and strided. After an error only the destructor may be called.
class PtWriter {
 public:
  static absl::StatusOr<std::unique_ptr<PtWriter>> create(
      const std::string& path, const PtWriterOptions& options = {});

  absl::Status begin_dict(const std::string& key);
  absl::Status begin_ordered_dict(const std::string& key);
  absl::Status end_dict();
  absl::Status tensor(const std::string& key, const at::Tensor& tensor);
  absl::Status value(const std::string& key, const PtScalar& value);

  // Writes a tensor's bytes now, to be placed in a dict later, once or several
  // times.
  absl::StatusOr<PickledTensor> store(const at::Tensor& tensor);
  absl::Status place(const std::string& key, const PickledTensor& stored);

  // Leaves room for the bytes of a dense tensor, which others write, in memory
  // order, to the file at temporary_path().
  struct Reserved {
    PickledTensor stored;
    int64_t offset = 0;  // In the file, in bytes.
    size_t entry = 0;
  };
  // Errors: InvalidArgument for a dtype that no checkpoint holds.
  absl::StatusOr<Reserved> reserve(c10::ScalarType dtype,
                                   const std::vector<int64_t>& sizes,
                                   const std::vector<int64_t>& strides);
  // They are there, durable, and have this CRC-32.
  absl::Status complete(const Reserved& reserved, uint32_t crc);

  // Requires: every dict has ended.
  absl::Status commit();

  const std::string& path() const { return file_->path(); }
  const std::string& temporary_path() const { return file_->temporary_path(); }

 private:
  // A written range of a storage, by its first byte.
  struct WrittenRange {
    int64_t end;
    c10::ScalarType dtype;
    std::string key;
  };
  // The weak reference keeps the address from being used by another storage.
  struct WrittenStorage {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::map<int64_t, WrittenRange> ranges;
  };

  PtWriter(std::unique_ptr<AtomicFile> file, const PtWriterOptions& options);
  absl::Status add_key(const std::string& key);
  absl::StatusOr<PickledTensor> store_dense(const at::Tensor& tensor);
  bool find_written(const at::Tensor& tensor, int64_t begin, int64_t end,
                    PickledTensor* out) const;
  void remember(const at::Tensor& tensor, int64_t begin, int64_t end,
                const std::string& key);
  std::string next_storage();
  absl::StatusOr<std::string> write_storage(const void* data, int64_t size);

  const PtWriterOptions options_;
  std::unique_ptr<AtomicFile> file_;
  ZipWriter zip_;
  PickleWriter pickle_;
  std::vector<std::set<std::string>> open_dicts_;
  std::unordered_map<const c10::StorageImpl*, WrittenStorage> written_;
  int64_t num_storages_ = 0;
};

}  // namespace fullshard

#endif  // FULLSHARD_IO_PT_WRITER_H_
