#include "fullshard/data/fashion_captions.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"
#include "fullshard/data/idx_file.h"

// The linker's names for the files that BUILD turns into an object.
extern "C" {
extern const char _binary_train_images_gz_start[];
extern const char _binary_train_images_gz_end[];
extern const char _binary_train_labels_gz_start[];
extern const char _binary_train_labels_gz_end[];
extern const char _binary_test_images_gz_start[];
extern const char _binary_test_images_gz_end[];
extern const char _binary_test_labels_gz_start[];
extern const char _binary_test_labels_gz_end[];
}

namespace fullshard {
namespace {

const std::vector<std::string>& class_names() {
  static const auto* const names = new std::vector<std::string>{
      "t-shirt", "trouser", "pullover", "dress", "coat",
      "sandal",  "shirt",   "sneaker",  "bag",   "ankle boot"};
  return *names;
}

absl::string_view bytes(const char* begin, const char* end) {
  return absl::string_view(begin, static_cast<size_t>(end - begin));
}

absl::StatusOr<CaptionDataset> make_split(
    const std::string& name, absl::string_view images, absl::string_view labels,
    std::shared_ptr<const CharTokenizer> tokenizer) {
  FS_ASSIGN_OR_RETURN(at::Tensor pixels,
                      read_idx_gz(images, absl::StrCat(name, " images")));
  FS_ASSIGN_OR_RETURN(const at::Tensor classes,
                      read_idx_gz(labels, absl::StrCat(name, " labels")));
  std::vector<std::string> captions;
  for (int64_t i = 0; i < classes.numel(); ++i) {
    const size_t label = classes.const_data_ptr<uint8_t>()[i];
    if (label >= class_names().size()) {
      return absl::DataLossError(absl::StrCat(
          name, " labels: expected a class from 0 to 9, got ", label));
    }
    captions.push_back(class_names()[label]);
  }
  return CaptionDataset::create(std::move(pixels), std::move(captions),
                                std::move(tokenizer));
}

}  // namespace

absl::StatusOr<FashionCaptions> load_fashion_captions() {
  auto tokenizer = std::make_shared<const CharTokenizer>(class_names());
  FS_ASSIGN_OR_RETURN(
      CaptionDataset training,
      make_split(
          "training",
          bytes(_binary_train_images_gz_start, _binary_train_images_gz_end),
          bytes(_binary_train_labels_gz_start, _binary_train_labels_gz_end),
          tokenizer));
  FS_ASSIGN_OR_RETURN(
      CaptionDataset held_out,
      make_split(
          "held-out",
          bytes(_binary_test_images_gz_start, _binary_test_images_gz_end),
          bytes(_binary_test_labels_gz_start, _binary_test_labels_gz_end),
          tokenizer));
  return FashionCaptions{std::move(training), std::move(held_out)};
}

}  // namespace fullshard
