// Whole parameters and buffers, into a state dict and from one.

#include <deque>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/catch_errors.h"
#include "fullshard/core/max_over_ranks.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/gather_shards.h"
#include "fullshard/sharding/sharded_state.h"
#include "fullshard/sharding/whole_tensors.h"

namespace fullshard {
namespace {

using internal::FlatParameter;

void collect_names(torch::nn::Module& module, const std::string& prefix,
                   std::vector<std::string>& names) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (item.value().defined()) names.push_back(prefix + item.key());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (item.value().defined()) names.push_back(prefix + item.key());
  }
  for (const auto& child : module.named_children()) {
    collect_names(*child.value(), prefix + child.key() + ".", names);
  }
}

// What a tensor of a state dict must look like.
struct Expected {
  std::string kind;  // "parameter" or "tensor"
  std::string name;
  at::IntArrayRef sizes;
  at::ScalarType dtype;
};

absl::Status check(const Expected& expected, const at::Tensor& got,
                   bool cast_dtypes) {
  const std::string where =
      absl::StrCat(expected.kind, " '", expected.name, "': expected ");
  if (got.sizes() != expected.sizes) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "shape ", c10::str(expected.sizes), ", got ",
                     c10::str(got.sizes())));
  }
  if (got.scalar_type() != expected.dtype && !cast_dtypes) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "dtype ", at::toString(expected.dtype), ", got ",
                     at::toString(got.scalar_type()),
                     "; set LoadOptions::cast_dtypes to convert it"));
  }
  return absl::OkStatus();
}

Expected expected(const LocalShard& shard) {
  return {"parameter", shard.name, shard.sizes, shard.values.scalar_type()};
}

// Fills shards one after the other. What follows is announced for read_ahead
// while less than this is: enough for a disk, little in the page cache.
constexpr int64_t kReadAheadBytes = int64_t{16} << 20;

class ShardReader {
 public:
  using Find = std::function<absl::StatusOr<at::Tensor>(const LocalShard&)>;

  // `shards`: those that will be filled, in that order, with elements of what
  // `find` returns for each.
  ShardReader(std::vector<LocalShard> shards, Find find,
              const LoadOptions& options)
      : shards_(std::move(shards)), find_(std::move(find)), options_(options) {}

  absl::Status fill_next() {
    while (found_.empty() || (options_.read_ahead && has_room_ahead())) {
      FS_RETURN_IF_ERROR(find_one());
    }
    const LocalShard& shard = shards_[num_found_ - found_.size()];
    const at::Tensor full = std::move(found_.front());
    found_.pop_front();
    at::Tensor values = shard.values;
    bytes_ahead_ -= static_cast<int64_t>(values.nbytes());
    if (options_.read) {
      return options_.read(full, shard.order, shard.begin, values);
    }
    values.copy_(elements_in_order(full, shard.order)
                     .narrow(0, shard.begin, values.numel()));
    return absl::OkStatus();
  }

 private:
  bool has_room_ahead() const {
    return num_found_ < shards_.size() && bytes_ahead_ < kReadAheadBytes;
  }
  absl::Status find_one() {
    const LocalShard& shard = shards_[num_found_];
    FS_ASSIGN_OR_RETURN(at::Tensor full, find_(shard));
    const int64_t numel = shard.values.numel();
    if (options_.read_ahead) {
      options_.read_ahead(full, shard.order, shard.begin, numel);
    }
    found_.push_back(std::move(full));
    ++num_found_;
    bytes_ahead_ += static_cast<int64_t>(shard.values.nbytes());
    return absl::OkStatus();
  }

  const std::vector<LocalShard> shards_;
  const Find find_;
  const LoadOptions& options_;
  size_t num_found_ = 0;
  std::deque<at::Tensor> found_;  // And not filled: the last of num_found_.
  int64_t bytes_ahead_ = 0;
};

}  // namespace

// Takes tensors from a source, on every rank or from rank 0 to the others.
class ShardedModule::Loader {
 public:
  using Names = std::vector<std::string>;

  Loader(const ProcessGroups& groups, const TensorSource& source,
         const LoadOptions& options)
      : groups_(groups), source_(source), options_(options) {}

  bool broadcasts() const {
    return options_.from_rank0 && groups_.world_size() > 1;
  }
  bool wants(const std::string& name) const {
    return !options_.names || options_.names(name);
  }

  // The tensor, under its name or, if there is none, under an alias.
  absl::StatusOr<at::Tensor> read(const Expected& expected,
                                  const Names& aliases = {}) const {
    return catch_errors(expected.name, [&]() -> absl::StatusOr<at::Tensor> {
      absl::StatusOr<at::Tensor> tensor = source_(expected.name);
      for (const std::string& alias : aliases) {
        if (!absl::IsNotFound(tensor.status())) break;
        absl::StatusOr<at::Tensor> other = source_(alias);
        if (other.ok()) tensor = std::move(other);
      }
      FS_RETURN_IF_ERROR(tensor.status());
      FS_RETURN_IF_ERROR(check(expected, *tensor, options_.cast_dtypes));
      return tensor;
    });
  }

  // The same, of rank 0. Collective.
  absl::StatusOr<at::Tensor> receive(const Expected& expected,
                                     const Names& aliases = {}) const {
    absl::StatusOr<at::Tensor> own(at::Tensor{});
    if (groups_.rank() == 0) own = read(expected, aliases);
    FS_RETURN_IF_ERROR(agree(groups_, own.status(),
                             absl::StrCat("load of '", expected.name, "'")));
    at::Tensor tensor =
        at::empty(expected.sizes,
                  at::TensorOptions(groups_.device()).dtype(expected.dtype));
    if (groups_.rank() == 0) tensor.copy_(*own);
    if (tensor.numel() == 0) return tensor;
    // As bytes: every dtype can be sent, whatever the backend knows.
    std::vector<at::Tensor> bytes = {
        tensor.view({tensor.numel()}).view(at::kByte)};
    CollectiveScope scope("broadcast of a load", &expected.name, 0);
    groups_.world()->broadcast(bytes)->wait();
    return tensor;
  }

 private:
  const ProcessGroups& groups_;
  const TensorSource& source_;
  const LoadOptions& options_;
};

std::vector<std::string> ShardedModule::state_dict_names() const {
  std::vector<std::string> names;
  collect_names(*module_, "", names);
  return names;
}

absl::Status ShardedModule::full_state_dict(
    const TensorSink& sink, bool all_ranks,
    const std::function<absl::Status()>& finish) const {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const bool receives = all_ranks || groups().rank() == 0;
  absl::Status status;
  auto send = [&](const std::string& name, const at::Tensor& tensor) {
    if (!receives || !status.ok()) return;
    status = catch_errors(name, [&] { return sink(name, tensor); });
  };
  return catch_errors("full_state_dict", [&]() -> absl::Status {
    for (const auto& unit : state_->units()) {
      for (const auto& flat : unit->flats) {
        const at::Tensor full = internal::gather_shards(
            *flat, flat->master_shard(), *state_->shard_group(), "all_gather");
        for (size_t i = 0; i < flat->parameters().size(); ++i) {
          const at::Tensor view = flat->view_of(full, i);
          send(flat->parameters()[i].name, view);
          for (const std::string& alias : flat->parameters()[i].aliases) {
            send(alias, view);
          }
        }
      }
    }
    for (const std::string& name : whole_->names()) {
      send(name, whole_->value(name));
    }
    if (receives && status.ok() && finish) {
      status = catch_errors("full_state_dict", finish);
    }
    return agree(groups(), status, "full_state_dict");
  });
}

absl::Status ShardedModule::load_full_state_dict(const TensorSource& source,
                                                 const LoadOptions& options) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const Loader loader(groups(), source, options);
  return catch_errors("load_full_state_dict", [&]() -> absl::Status {
    if (loader.broadcasts()) return load_from_rank0(loader);
    absl::Status status;
    for (const LocalShard& shard : local_shards()) {
      if (!loader.wants(shard.name)) continue;
      status.Update(loader.read(expected(shard), shard.aliases).status());
    }
    for (const auto& [name, value] : whole_tensors()) {
      if (!loader.wants(name)) continue;
      status.Update(
          loader.read({"tensor", name, value.sizes(), value.scalar_type()})
              .status());
    }
    FS_RETURN_IF_ERROR(agree(groups(), status, "load_full_state_dict"));
    const auto is_wanted = [&](const LocalShard& shard) {
      return loader.wants(shard.name) && shard.values.numel() > 0;
    };
    std::vector<LocalShard> wanted;
    for (LocalShard& shard : local_shards()) {
      if (shard.own_turn && is_wanted(shard)) wanted.push_back(shard);
    }
    ShardReader reader(
        std::move(wanted),
        [&](const LocalShard& shard) {
          return loader.read(expected(shard), shard.aliases);
        },
        options);
    return load_local_shards(
        [&](const LocalShard& shard) {
          return is_wanted(shard) ? reader.fill_next() : absl::OkStatus();
        },
        [&](const std::string& name) -> absl::StatusOr<at::Tensor> {
          return loader.wants(name) ? source(name) : at::Tensor();
        });
  });
}

absl::Status ShardedModule::load_from_rank0(const Loader& loader) {
  state_->begin_update();
  for (const auto& unit : state_->units()) {
    for (const auto& flat : unit->flats) {
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        const auto& original = flat->parameters()[i];
        if (!loader.wants(original.name)) continue;
        FS_ASSIGN_OR_RETURN(
            const at::Tensor full,
            loader.receive({"parameter", original.name, original.tensor.sizes(),
                            flat->state_dtype()},
                           original.aliases));
        flat->load(i, full);
      }
    }
  }
  for (const std::string& name : whole_->names()) {
    if (!loader.wants(name)) continue;
    const at::Tensor value = whole_->value(name);
    FS_ASSIGN_OR_RETURN(
        const at::Tensor full,
        loader.receive({"tensor", name, value.sizes(), value.scalar_type()}));
    FS_RETURN_IF_ERROR(whole_->load(name, full));
  }
  return absl::OkStatus();
}

}  // namespace fullshard
